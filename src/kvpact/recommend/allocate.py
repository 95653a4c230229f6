"""Which layer gets which spec of a ladder, within a number of bytes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from kvpact.recommend.base import RecommendationError


class Rung(NamedTuple):
    """What one spec takes and costs in one layer."""

    spec: str
    bytes: int
    cost: float


def allocate(ladders: Mapping[int, Sequence[Rung]], budget: int) -> dict[int, Rung]:
    """Give every layer one of its specs.

    Each layer starts at its smallest spec; then the step that takes off most cost per byte is made
    as long as one fits. Rungs that a step over them beats are left out beforehand, so that steps of
    a layer are worth less and less: more bytes never lead to a larger cost.

    Parameters
    ----------
    ladders : mapping
        Layer -> its rungs, in any order.
    budget : int
        Bytes for all layers together.

    Returns
    -------
    dict
        Layer -> rung, at most `budget` bytes in sum.

    Raises
    ------
    RecommendationError
        The smallest specs take more.
    """
    paths = {layer: _worthwhile(rungs) for layer, rungs in ladders.items()}
    taken = {layer: path[0] for layer, path in paths.items()}
    left = budget - sum(rung.bytes for rung in taken.values())
    if left < 0:
        raise RecommendationError(
            f"the budget leaves {budget:,} bytes for compressed layers, and the smallest specs "
            f"take {budget - left:,}; give a larger --budget"
        )
    steps = [
        (_worth(path[i], path[i + 1]), layer, i + 1)
        for layer, path in paths.items()
        for i in range(len(path) - 1)
    ]
    closed: set[int] = set()
    for _, layer, place in sorted(steps, key=lambda step: (-step[0], step[1:])):
        rung = paths[layer][place]
        more = rung.bytes - taken[layer].bytes
        if layer in closed or more > left:
            closed.add(layer)  # a later step of this layer would leave this one out
            continue
        taken[layer], left = rung, left - more
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
