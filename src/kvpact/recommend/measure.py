"""Codes every layer's K and V by every candidate and takes the statistics."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch

from kvpact.cache import ContiguousCache
from kvpact.errors import GeometryError, NonFiniteError, SpecError
from kvpact.evaluate.feed import Steps
from kvpact.key_offset import KeyOffset
from kvpact.methods.base import bytes_per_slot
from kvpact.recommend.base import Measured
from kvpact.recommend.budget import layer_bytes, layer_geometry
from kvpact.recommend.statistics import ExactAttention
from kvpact.spec import Spec, parse_spec

if TYPE_CHECKING:
    from kvpact.integrations.transformers.record import Seen, SeenLayer


def allowed(spec: str, seen: Seen) -> str:
    """Return why a spec can't be used on the model's widths; empty where it can."""
    try:
        for layer in seen.layers.values():
            slot_bits(parse_spec(spec), layer)
    except (SpecError, GeometryError) as error:
        return str(error)
    return ""


def slot_bits(spec: Spec, seen: SeenLayer) -> float:
    """Return the bits of packed slots per number of K and V of one layer."""
    dims = seen.k.shape[3], seen.v.shape[3]
    k = spec.key.key_codec(dims[0], torch.float16)
    v = spec.value.value_codec(dims[1], torch.float16)
    return 8 * (bytes_per_slot(k) + bytes_per_slot(v)) / sum(dims)


def measure(
    seen: Seen,
    specs: list[str],
    context: int,
    offsets: Mapping[int, KeyOffset],
    steps: Steps,
) -> tuple[list[Measured], dict[str, str]]:
    """Return each spec's statistics on every layer, and why others can't hold a layer.

    K and V go through a cache of one layer, so that codecs learn, groups are formed and key
    offsets are taken off as in use; the window is off, so that all tokens are coded.

    Parameters
    ----------
    seen : Seen
        Of the model's pass.
    specs : list of str
        Such as `allowed` allows.
    context : int
        Tokens that sizes are told at.
    offsets : mapping
        Layer -> key offset (see `key_offsets`).
    steps : Steps
        One for each layer and spec is reported.
    """
    keys: dict[str, dict[int, float]] = {spec: {} for spec in specs}
    values: dict[str, dict[int, float]] = {spec: {} for spec in specs}
    refused: dict[str, str] = {}
    with torch.inference_mode():
        for index, layer in sorted(seen.layers.items()):
            exact = ExactAttention(layer)
            offset = {0: offsets[index]} if index in offsets else None
            for spec in specs:
                steps.done(f"{spec}, layer {index}")
                if spec in refused:
                    continue
                coded = parse_spec(spec).with_options(window=0)
                geometry = layer_geometry(layer, layer.k.dtype)
                cache = ContiguousCache([coded], geometry, key_offsets=offset)
                try:
                    cache.store(0, layer.k, layer.v, q=layer.q)
                except NonFiniteError as error:
                    refused[spec] = f"layer {index}: {error}"
                    continue
                keys[spec][index] = exact.key_statistic(cache.dequantize(0, "k"))
                values[spec][index] = exact.value_error(cache.dequantize(0, "v"))
    measured = [
        Measured(
            spec,
            sum(slot_bits(parse_spec(spec), x) for x in seen.layers.values()) / len(seen.layers),
            {i: layer_bytes(spec, x, context) for i, x in sorted(seen.layers.items())},
            keys[spec],
            values[spec],
        )
        for spec in specs
        if spec not in refused
    ]
    return measured, refused
