"""The places of a stream's tokens after an append, for all who count them or move its tail.

`packed` tokens have slots; those from `tail` to `length` are exact, and `spare` more fit after
them. `StreamOracle` defines what is packed; this module also says when the tail moves.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from kvpact.kernels import TokenMemory
from kvpact.units import FEW

MOST_STEP = 8
"""Appends of so many tokens to what is held leave room after the tail for the next ones."""
SLACK = 8
"""Tokens of that room; a tail with more was given it by `reserve`, and keeps it."""
PAID = 64
"""Packed tokens that have saved more bytes than that room takes."""


class Advance(NamedTuple):
    """A stream's counts after an append.

    `stays`: the new tokens are copied after the tail, where it lies. Otherwise what is exact from
    now on, old or new, is put elsewhere, with room for `spare` more, and packed tokens are free.
    """

    packed: int
    tail: int
    length: int
    spare: int
    stays: bool


@lru_cache(maxsize=1024)  # the layers of a model count the same: all but the first ask no Python
def advance(
    packed: int,
    tail: int,
    length: int,
    spare: int,
    new: int,
    unit: int,
    window: int,
    learns_from: int = 0,
) -> Advance:
    """Return the counts after `new` tokens, which are packed in whole units (see `unit_of`)."""
    held, length = length, length + new
    out = (length - window) // unit * unit if length > window else 0
    out = out if out >= learns_from else 0
    packed, start = max(packed, out), max(tail, out)  # what was sealed stays in the tail
    # A tail that moved on frees what it packed, but for room that somebody asked for.
    if tail < held and start < length and spare >= new and (start == tail or spare > SLACK):
        return Advance(packed, start, length, spare - new, True)
    unpaid = new > MOST_STEP or start < PAID or start == length
    return Advance(packed, start, length, 0 if unpaid else SLACK if start > FEW else 2, False)


def next_memory(memory: TokenMemory, held: int, x: Tensor, now: Advance) -> TokenMemory:
    """Return where the exact tokens lie after new ones, with these at their end."""
    if now.stays:
        memory.tokens(held, now.length).copy_(x)
        return memory
    start, kept = now.tail, max(held - now.tail, 0)
    x = x[:, :, start - held :] if start > held else x
    if not now.spare:
        # A slice would keep the whole of `x` alive with it.
        exact = torch.cat([memory.tokens(start, held), x], 2) if kept else x.clone()
        return TokenMemory(exact, start)
    count = now.length - start
    exact = x.new_zeros(*x.shape[:2], count + now.spare, x.shape[3])
    if kept:
        exact[:, :, :kept] = memory.tokens(start, held)
    exact[:, :, kept:count] = x
    return TokenMemory(exact, start)
