"""What is remarkable in a model's keys, and which specs do badly on which layers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import TYPE_CHECKING

from kvpact.key_offset import KeyOffset
from kvpact.recommend.base import Measured
from kvpact.spec import parse_spec

if TYPE_CHECKING:
    from kvpact.integrations.transformers.record import Seen

OUTLIER = 50.0
"""A channel is an outlier if its energy is so many times the median channel's of its head."""
BAD = 10.0
"""A spec does badly on a layer if it costs so many times what the others of equal bits do."""


def bias_notes(offsets: Mapping[int, KeyOffset]) -> list[str]:
    """Tell which layers have keys with a large bias."""
    if not offsets:
        return []
    layers = ", ".join(f"{layer} ({x.norm:.1f})" for layer, x in sorted(offsets.items()))
    return [
        "large key biases, stored apart where the cache is given the model; layers and norms: "
        + layers
    ]


def outlier_notes(seen: Seen) -> list[str]:
    """Tell which layers have outlier channels in K or V."""
    notes = []
    for side in ("k", "v"):
        found = []
        for index, layer in sorted(seen.layers.items()):
            energy = getattr(layer, side)[0].float().square().mean(1)
            ratio = energy / energy.median(1, keepdim=True).values.clamp(min=1e-30)
            count = int((ratio > OUTLIER).sum())
            if count:
                found.append(f"{index} ({count}, {float(ratio.max()):.0f})")
        if found:
            notes.append(
                f"outlier channels in {side.upper()}, of more than {OUTLIER:.0f} times the median "
                f"energy; layers, how many, and the largest: {', '.join(found)}"
            )
    return notes


def bad_notes(measured: Sequence[Measured]) -> list[str]:
    """Warn of specs that do far worse on a layer than the others of as many bits."""
    notes = []
    for one in measured:
        others = [x for x in measured if x is not one and _bits(x) == _bits(one)]
        if not others:
            continue
        for side in ("key", "value"):
            bad = {
                layer: size / usual
                for layer, size in getattr(one, side).items()
                if size > BAD * (usual := median(getattr(x, side)[layer] for x in others)) > 0
            }
            if bad:
                names = ", ".join(map(str, bad))
                notes.append(
                    f"{one.spec} does badly on {'K' if side == 'key' else 'V'} of layers {names}: "
                    f"up to {max(bad.values()):.0f} times the KL of others of as many bits"
                )
    return notes


def _bits(one: Measured) -> int:
    return int(parse_spec(one.spec).key.bits)
