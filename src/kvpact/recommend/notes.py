"""What is remarkable in a model's keys and values."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from kvpact.key_offset import KeyOffset

if TYPE_CHECKING:
    from kvpact.integrations.transformers.record import Seen

OUTLIER = 50.0
"""A channel is an outlier if its energy is so many times the median channel's of its head."""


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
