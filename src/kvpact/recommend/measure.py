"""Measurement of each candidate spec's cost in each layer's K and V."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from statistics import fmean
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from kvpact.cache import ContiguousCache
from kvpact.errors import GeometryError, NonFiniteError, SpecError
from kvpact.evaluate.feed import Steps
from kvpact.geometry import CacheGeometry
from kvpact.key_offset import KeyOffset
from kvpact.methods.base import bytes_per_slot
from kvpact.recommend.base import SIDES, Measured
from kvpact.recommend.budget import layer_geometry, slot_bytes
from kvpact.recommend.gradients import Sensitivity
from kvpact.spec import parse_spec

if TYPE_CHECKING:
    from kvpact.integrations.transformers.attention.seen import Seen

LADDER = (*(f"trellis:bits={bits}" for bits in range(2, 7)), "int:bits=8", "none")
"""The specs that K or V of a layer may have in a recipe, from the fewest bytes to the most."""

CANDIDATES = (
    *LADDER[:-1],
    "turboquant:bits=4",
    "int:bits=4,group={head_dim},rotate=true",
    "kivi:bits=4",
    "turboquant:bits=3",
    "turboquant:bits=3,center=64",
    "kivi:bits=2",
)
"""Specs for all layers: all of `LADDER` but ``none``, which costs nothing in quality, and others.
``{head_dim}`` is the width of the model's widest keys."""


class Costs(NamedTuple):
    """The costs of one spec by layer."""

    key: dict[int, Tensor]  # ``[2, draws]``: costs, and expected ones
    value: dict[int, Tensor]
    shrunk: dict[int, float]  # what V loses in length, see `Sensitivity`


@dataclass(frozen=True)
class Survey:
    """The measurements of a model on a text, for plans of any budget."""

    seen: Seen  # queries, K and V of the text
    costs: Mapping[str, Costs]  # of each spec
    draws: int  # random directions of the gradients
    left_out: tuple[str, ...]  # specs that the model's K and V do not allow, and why
    notes: tuple[str, ...]  # large key biases and outlier channels
    tokens: int  # of the text


def _refusal(spec: str, seen: Seen) -> str:
    """Return why a spec can't be used on the model's widths; empty where it can."""
    try:
        for layer in seen.layers.values():
            slot_bits(spec, layer_geometry(layer))
    except (SpecError, GeometryError) as error:
        return str(error)
    return ""


@cache
def slot_bits(text: str, shape: CacheGeometry) -> float:
    """Return the bits of packed slots per number of K and V of one layer."""
    dims = shape.head_dim, shape.value_dim
    k, v = parse_spec(text).codecs(*dims, torch.float16)
    return 8 * (bytes_per_slot(k) + bytes_per_slot(v)) / sum(dims)


def code_layers(
    sensitivity: Sensitivity, offsets: Mapping[int, KeyOffset], steps: Steps, passes: float
) -> tuple[dict[str, Costs], dict[str, str]]:
    """Return each candidate's costs on every layer, and why others can't hold the model's K and V.

    K and V go through a cache of one layer, so that codecs learn, groups are formed and key
    offsets are taken off as in use; the window is off, so that all tokens are coded. `steps`: all
    of it takes `passes` forward passes over a chunk.
    """
    seen = sensitivity.seen
    width = max(layer.k.shape[3] for layer in seen.layers.values())
    candidates = [text.format(head_dim=width) for text in CANDIDATES]
    refused = {spec: why for spec in candidates if (why := _refusal(spec, seen))}
    specs = [spec for spec in candidates if spec not in refused]
    costs = {spec: Costs({}, {}, {}) for spec in specs}
    weight = passes / (len(specs) * len(seen.layers))
    with torch.inference_mode():
        for index, layer in seen.layers.items():
            geometry = layer_geometry(layer, layer.k.dtype)
            offset = {0: offsets[index]} if index in offsets else None
            for spec in specs:
                steps.done(f"{spec}, layer {index}", weight)
                if spec in refused:
                    continue
                coded = parse_spec(spec).with_options(window=0)
                cache = ContiguousCache([coded], geometry, key_offsets=offset)
                try:
                    cache.store(0, k=layer.k, v=layer.v, q=layer.q)
                except NonFiniteError as error:
                    refused[spec] = f"layer {index}: {error}"
                    del costs[spec]
                    continue
                key, value = cache.dequantize(0, "k"), cache.dequantize(0, "v")
                costs[spec].key[index] = sensitivity.noise(index, "key", key)
                costs[spec].value[index] = sensitivity.noise(index, "value", value)
                costs[spec].shrunk[index] = sensitivity.shrunk(index, value)
    return costs, refused


def measured_of(
    survey: Survey, context: int, draws: Sequence[int], *, smooth: bool = True
) -> list[Measured]:
    """Return each spec's cost by some of the draws, and its bytes at a context.

    `smooth`: whether the specs of a ladder share one sensitivity a layer: the mean of their ratios
    of cost and expected cost. A recipe chooses among them by their costs on single layers, whose
    random errors it would take for merits. Sums over the layers stay as they are.
    """
    costs, choose = survey.costs, _smooth if smooth else _plain
    keys = choose({spec: _means(one.key, draws) for spec, one in costs.items()})
    values = choose({spec: _means(one.value, draws) for spec, one in costs.items()})
    layers, found = survey.seen.layers, []
    for spec, one in costs.items():
        held = slot_bytes(spec, survey.seen, context)
        key_bytes, value_bytes = ({i: held[i, side] for i in layers} for side in SIDES)
        bits = fmean(slot_bits(spec, layer_geometry(x)) for x in layers.values())
        measured = keys[spec], values[spec], one.shrunk
        found.append(Measured(spec, bits, key_bytes, value_bytes, *measured))
    return found


def _means(costs: Mapping[int, Tensor], draws: Sequence[int]) -> dict[int, list[float]]:
    return {layer: x[:, list(draws)].mean(1).tolist() for layer, x in costs.items()}


_Pairs = Mapping[str, Mapping[int, Sequence[float]]]


def _plain(costs: _Pairs) -> dict[str, dict[int, float]]:
    return {spec: {i: pair[0] for i, pair in layers.items()} for spec, layers in costs.items()}


def _smooth(costs: _Pairs) -> dict[str, dict[int, float]]:
    found = _plain(costs)
    family = [spec for spec in costs if spec in LADDER]
    for spec in family:
        shares = {
            i: pair[1] * fmean(_ratio(*costs[other][i]) for other in family)
            for i, pair in costs[spec].items()
        }
        whole, sum_of_shares = sum(found[spec].values()), sum(shares.values())
        if sum_of_shares > 0:
            found[spec] = {i: whole * x / sum_of_shares for i, x in shares.items()}
    return found


def _ratio(cost: float, expected: float) -> float:
    return cost / expected if expected > 0 else 0.0
