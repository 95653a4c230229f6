"""Allocation of a ladder's specs to K and V of each layer, within a number of bytes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from kvpact.recommend.base import RecommendationError, Slot


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
