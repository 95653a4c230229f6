"""Units: tokens of a stream that are packed together, when, and their bytes; without torch."""

from __future__ import annotations

from functools import lru_cache
from math import lcm
from typing import NamedTuple

TILE = 32
"""Tokens whose codes lie together."""
QUERIES = 32
"""A codec learns from the queries of so many tokens, the last ones before it learns."""
SEGMENT_TOKENS = 128
FEW = 512
"""As long as a stream has no more packed tokens, a segment is a tile: room costs bytes."""


@lru_cache(maxsize=64)
def unit_of(group: int, window: int) -> int:
    """Return how many tokens are packed together: whole groups, a tile of them after a window."""
    return group * -(-TILE // group) if window else group


def out_of_window(group: int, window: int, length: int) -> int:
    """Return how many of the first `length` tokens have left the window, in whole units."""
    unit = unit_of(group, window)
    return max(length - window, 0) // unit * unit


@lru_cache(maxsize=64)
def learning(learns_from: int, group: int, window: int) -> tuple[int, int]:
    """Return the first token whose queries a codec learns from, and how many are held then."""
    unit = unit_of(group, window)
    held = window + -(-learns_from // unit) * unit
    return max(held - QUERIES, 0), held


def segment_tokens(group: int, tokens: int, device: str = "cpu") -> int:
    """Return the tokens of a segment where so many are packed; on a GPU one size from the start."""
    return lcm(TILE if tokens <= FEW and device == "cpu" else SEGMENT_TOKENS, group)


class StreamFacts(NamedTuple):
    """The facts that the bytes of K or V of one layer depend on, of codec and method.

    `slot`: bytes of a packed token of one head; `width`: of its numbers; `state`: of what is
    learnt.
    """

    slot: float
    width: int
    group: int
    sinks: int
    window: int
    learns_from: int
    state: int

    def held(self, tokens: int, batch: int, heads: int, itemsize: int) -> dict[str, int]:
        """Return the bytes held after so many tokens, by what they are; see `planned_bytes`."""
        rows, token = batch * heads, batch * heads * self.width * itemsize
        packed = out_of_window(self.group, self.window, tokens)
        packed = packed if packed >= self.learns_from else 0
        segment = segment_tokens(self.group, packed)
        used, room = (
            round(self.slot * count * rows) for count in (packed, -(-packed // segment) * segment)
        )
        waiting = 0  # energies of the queries that a codec learns from
        if not packed and self.learns_from:
            first, _ = learning(self.learns_from, self.group, self.window)
            waiting = max(tokens - first, 0) * self.width * rows
        return {
            "slots": used,
            "factors": self.state if packed else waiting,
            "sinks": self.sinks * token if packed else 0,
            "window": (tokens - packed) * token,
            "unused": room - used,
        }
