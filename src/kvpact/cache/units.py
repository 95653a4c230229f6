"""Which tokens are packed together, and when."""

from __future__ import annotations

from functools import lru_cache

from kvpact.formats import TILE
from kvpact.methods import Codec

QUERIES = 32
"""A codec learns from the queries of so many tokens, the last ones before it learns."""


@lru_cache(maxsize=64)
def unit_of(group: int, window: int) -> int:
    """Return how many tokens are packed together: whole groups, a tile of them behind a window."""
    return group * -(-TILE // group) if window else group


def out_of_window(codec: Codec, window: int, length: int) -> int:
    """Return how many of the first `length` tokens have left the window, in whole units."""
    unit = unit_of(codec.group, window)
    return max(length - window, 0) // unit * unit


@lru_cache(maxsize=64)
def learning(learns_from: int, group: int, window: int) -> tuple[int, int]:
    """Return the first token whose queries a codec learns from, and how many tokens there are then.

    It learns when as many tokens as it wants have left the window.
    """
    unit = unit_of(group, window)
    held = window + -(-learns_from // unit) * unit
    return max(held - QUERIES, 0), held
