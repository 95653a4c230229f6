"""Rounds in which all candidates take turns, so that a noisy machine is noisy for all."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Sequence

Turn = Callable[[], float]
WARM = 2
TORCH = ("sdpa", "matmul")


def turn_of(ring: Sequence[Callable[[], object]]) -> Turn:
    """Return a function that makes up to 12 calls, the next of the ring, and returns seconds."""
    place, todo = itertools.cycle(ring), min(len(ring), 12)

    def turn() -> float:
        start = time.perf_counter()
        for call in itertools.islice(place, todo):
            call()
        return (time.perf_counter() - start) / todo

    return turn


def measure(turns: dict[str, Turn], rounds: int) -> dict[str, list[float]]:
    """Return seconds per call of each candidate, one figure a round.

    Of torch's candidates those that take five times as long as its best one take part in every
    fifth round only: they are not what anything is compared with, and would take most of the time.
    """
    times: dict[str, list[float]] = {name: [] for name in turns}
    rare: set[str] = set()
    for index in range(rounds + WARM):
        if index == WARM:
            rare = hopeless({name: min(found) for name, found in times.items()})
            times = {name: [] for name in turns}
        for name, turn in turns.items():
            if name not in rare or (index - WARM) % 5 == 0:
                times[name].append(turn())
    return times


def hopeless(seconds: dict[str, float]) -> set[str]:
    """Return torch's candidates that are far from its best one."""
    torches = {name: found for name, found in seconds.items() if name.startswith(TORCH)}
    return {name for name, found in torches.items() if found > 5 * min(torches.values())}


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    """Return the quartiles; of a single value that value."""
    low, middle, high = (
        statistics.quantiles(values, n=4, method="inclusive")
        if len(values) > 1
        else [values[0]] * 3
    )
    return low, middle, high
