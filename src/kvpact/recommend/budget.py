"""Budgets, the bytes of caches at a context, and specs of K and V of each layer that fit."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from kvpact.cache import planned_bytes
from kvpact.errors import KVPactError, SpecError
from kvpact.files import bytes_of, share_of, size_text
from kvpact.geometry import CacheGeometry
from kvpact.integrations.sizes import size
from kvpact.recommend.base import SIDES, RecommendationError, Sizes, Slot
from kvpact.spec import Spec, parse_spec

if TYPE_CHECKING:
    from kvpact.integrations.transformers.attention.seen import Seen, SeenLayer

SMALLEST = "trellis:bits=2"  # of what a recipe is made of
_ITEM = 2  # bytes of an exact number


def budget_bytes(text: str, exact: int) -> int:
    """Return the bytes that ``25%`` of `exact`, ``4GB``, ``1.5GiB`` or ``1000000`` are."""
    share, text = share_of(text), text.strip()
    if share is None and not bytes_of(text) and not re.match(r"0+(\.0*)?\s*[a-zA-Z]*$", text):
        raise RecommendationError(
            f"budget {text!r} is neither a share such as 25%, nor bytes such as 4GB, nor a spec"
        )
    number = bytes_of(text) if share is None else share
    if number <= 0:
        raise RecommendationError(f"budget {text!r} leaves no room; give more than 0")
    if share is None:
        return int(number)
    if share > 1:
        raise RecommendationError(f"budget {text!r} is more than all; take 100% at most")
    return int(share * exact)


def check_budget(model: Any, text: str, context: int) -> None:
    """Raise `RecommendationError` where a budget is misspelt, or known to be too small."""
    if is_spec(text):
        return
    budget_bytes(text, 0)
    try:
        (least,) = size(model, SMALLEST, context).rows
    except KVPactError:
        return  # its shapes are seen when it runs
    if budget_bytes(text, least.exact) < least.total:
        share = f"{100 * least.total / least.exact:.1f}% of {size_text(least.exact)}"
        raise RecommendationError(
            f"budget {text} is too small at {context:,} tokens: the smallest recipe takes "
            f"{size_text(least.total)}, {share}; give more, or a share such as 25%"
        )


def is_spec(text: str) -> bool:
    """Return whether a budget is a spec, whose bytes are meant."""
    try:
        parse_spec(text)
    except SpecError:
        return False
    return True


def layer_geometry(seen: SeenLayer, dtype: torch.dtype = torch.float16) -> CacheGeometry:
    """Return the geometry of one layer; sizes count exact numbers in 16 bits."""
    return CacheGeometry(1, seen.k.shape[1], seen.k.shape[3], seen.v.shape[3], dtype=dtype)


@cache
def _side_bytes(spec: str, side: str, shape: CacheGeometry, context: int) -> int:
    widths = {"key": shape.head_dim, "value": shape.value_dim}
    if spec == "none":
        return shape.num_kv_heads * context * _ITEM * widths[side]
    whole, none = parse_spec(spec), parse_spec("none")
    exact_values = planned_bytes(none, shape, context)["total"] * widths["value"]
    keys = planned_bytes(Spec(whole.key, none.value), shape, context)["total"]
    keys -= exact_values // sum(widths.values())
    return keys if side == "key" else planned_bytes(whole, shape, context)["total"] - keys


def slot_bytes(spec: str, seen: Seen, context: int) -> dict[Slot, int]:
    """Return the bytes of each layer's K and V with a spec, as ``kvpact size`` counts them."""
    shapes = {layer: layer_geometry(x) for layer, x in seen.layers.items()}
    return {
        (layer, side): _side_bytes(spec, side, shape, context)
        for layer, shape in shapes.items()
        for side in SIDES
    }


def exact_sizes(seen: Seen, context: int) -> Sizes:
    """Return the exact cache's bytes at a context, without what linear attention holds: little."""
    if context < 1:
        raise RecommendationError(f"context {context} is not possible; take 1 or more tokens")
    covered = sum(slot_bytes("none", seen, context).values())
    native = sum(
        x.heads * (x.key_dim + x.value_dim) * _ITEM * min(context, x.window or context)
        for x in seen.bounded.values()
    )
    return Sizes(context, covered, native)


class Rung(NamedTuple):
    """The bytes and the cost of one spec for K or V of one layer."""

    spec: str
    bytes: int
    cost: float


def allocate(ladders: Mapping[Slot, Sequence[Rung]], budget: int) -> dict[Slot, Rung]:
    """Give every slot, K or V of a layer, one of its specs.

    Each slot starts at its smallest spec; then the step that takes off most cost per byte is made
    as long as one fits. Rungs that a step over them beats are left out beforehand, so that steps of
    a slot are worth less and less: more bytes never lead to a larger cost.

    `ladders`: the rungs of each slot, in any order; `budget`: bytes of all slots together, of which
    the smallest specs may not take more.
    """
    paths = {slot: _worthwhile(rungs) for slot, rungs in ladders.items()}
    taken = {slot: path[0] for slot, path in paths.items()}
    left = budget - sum(rung.bytes for rung in taken.values())
    if left < 0:
        raise RecommendationError(
            f"the budget leaves {budget:,} bytes for compressed layers, and the smallest specs "
            f"take {budget - left:,}; give a larger --budget"
        )
    steps = [
        (_worth(path[i], path[i + 1]), slot, i + 1)
        for slot, path in paths.items()
        for i in range(len(path) - 1)
    ]
    closed: set[Slot] = set()
    for _, slot, place in sorted(steps, key=lambda step: (-step[0], step[1:])):
        rung = paths[slot][place]
        more = rung.bytes - taken[slot].bytes
        if slot in closed or more > left:
            closed.add(slot)  # a later step of this slot would leave this one out
            continue
        taken[slot], left = rung, left - more
    return taken


def _worthwhile(rungs: Sequence[Rung]) -> list[Rung]:
    """Return the lower convex hull of cost over bytes."""
    path: list[Rung] = []
    for rung in sorted(rungs, key=lambda rung: (rung.bytes, rung.cost)):
        if path and rung.cost >= path[-1].cost:
            continue
        while len(path) > 1 and _worth(path[-2], path[-1]) <= _worth(path[-1], rung):
            path.pop()
        path.append(rung)
    return path


def _worth(before: Rung, after: Rung) -> float:
    """Return the cost that a step takes off per byte."""
    return (before.cost - after.cost) / max(after.bytes - before.bytes, 1)
