"""Codes every layer's K and V by every candidate, and tells what that costs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from kvpact.cache import ContiguousCache
from kvpact.errors import GeometryError, NonFiniteError, SpecError
from kvpact.evaluate.feed import Steps
from kvpact.key_offset import KeyOffset
from kvpact.methods.base import bytes_per_slot
from kvpact.recommend.base import Measured
from kvpact.recommend.budget import layer_geometry, side_bytes
from kvpact.recommend.candidates import LADDER
from kvpact.recommend.heat_map import SIDES
from kvpact.recommend.sensitivity import Sensitivity
from kvpact.spec import Spec, parse_spec

if TYPE_CHECKING:
    from kvpact.integrations.transformers.record import Seen, SeenLayer


class Costs(NamedTuple):
    """What one spec costs on each layer.

    `key`, `value`: layer -> ``[2, draws]``: costs of K and of V, and expected ones (see
    `Sensitivity.noise`); `shrunk`: layer -> what V loses in length (see `Sensitivity.shrunk`).
    """

    key: dict[int, Tensor]
    value: dict[int, Tensor]
    shrunk: dict[int, float]


@dataclass(frozen=True)
class Survey:
    """What was measured of a model on a text, for plans of any budget.

    `seen`: queries, K and V of the text; `costs`: of each spec; `draws`: random directions of the
    gradients; `left_out`: specs that the model's K and V do not allow, and why; `notes`: large key
    biases and outlier channels; `tokens`: of the text.
    """

    seen: Seen
    costs: Mapping[str, Costs]
    draws: int
    left_out: tuple[str, ...]
    notes: tuple[str, ...]
    tokens: int


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


def code_layers(
    sensitivity: Sensitivity,
    specs: list[str],
    offsets: Mapping[int, KeyOffset],
    steps: Steps,
    passes: float,
) -> tuple[dict[str, Costs], dict[str, str]]:
    """Return each spec's costs on every layer, and why others can't hold a layer.

    K and V go through a cache of one layer, so that codecs learn, groups are formed and key
    offsets are taken off as in use; the window is off, so that all tokens are coded.

    `specs`: such as `allowed` allows; `offsets`: layer -> key offset (see `key_offsets`); `steps`:
    all of it takes `passes` forward passes over a chunk.
    """
    weight = passes / (len(specs) * len(sensitivity.seen.layers))
    costs = {spec: Costs({}, {}, {}) for spec in specs}
    refused: dict[str, str] = {}
    with torch.inference_mode():
        for index, layer in sensitivity.seen.layers.items():
            offset = {0: offsets[index]} if index in offsets else None
            for spec in specs:
                steps.done(f"{spec}, layer {index}", weight)
                if spec in refused:
                    continue
                coded = parse_spec(spec).with_options(window=0)
                geometry = layer_geometry(layer, layer.k.dtype)
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


class SpecSizes(NamedTuple):
    """Bits of slots per number, mean of the layers; layer -> bytes of K, and of V."""

    slot_bits: float
    key: dict[int, int]
    value: dict[int, int]


def spec_sizes(survey: Survey, context: int) -> dict[str, SpecSizes]:
    """Return the sizes of every spec of a survey at a context."""
    layers = survey.seen.layers
    alike: dict[tuple[int, ...], SeenLayer] = {}
    of = {i: (x.k.shape[1], x.k.shape[3], x.v.shape[3]) for i, x in layers.items()}
    for i, x in layers.items():
        alike.setdefault(of[i], x)
    found = {}
    for spec in survey.costs:
        sides = [
            {shape: side_bytes(spec, side, x, context) for shape, x in alike.items()}
            for side in SIDES
        ]
        bits = {shape: slot_bits(parse_spec(spec), x) for shape, x in alike.items()}
        key, value = ({i: size[of[i]] for i in layers} for size in sides)
        found[spec] = SpecSizes(fmean(bits[of[i]] for i in layers), key, value)
    return found


def measured_of(
    survey: Survey,
    sizes: Mapping[str, SpecSizes],
    draws: Sequence[int],
    *,
    smooth: bool = True,
) -> list[Measured]:
    """Return what some of the draws say of each spec.

    `sizes`: of its specs (see `spec_sizes`). `smooth`: whether the specs of a ladder share one
    sensitivity a layer: the mean of their ratios of cost and expected cost. A recipe chooses among
    them by their costs on single layers, whose random errors it would take for merits. Sums over
    the layers stay as they are.
    """
    costs, choose = survey.costs, _smooth if smooth else _plain
    keys = choose({spec: _means(one.key, draws) for spec, one in costs.items()})
    values = choose({spec: _means(one.value, draws) for spec, one in costs.items()})
    return [
        Measured(spec, *sizes[spec], keys[spec], values[spec], costs[spec].shrunk) for spec in costs
    ]


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
