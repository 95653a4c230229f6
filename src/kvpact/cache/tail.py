"""Memory of a stream's exact tokens, with some room behind them."""

from __future__ import annotations

import torch
from torch import Tensor

from kvpact.cache.segments import FEW
from kvpact.kernels import TokenMemory

MOST_STEP = 8
"""Appends of so many tokens to what is held leave room behind the tail for the next ones."""
SLACK = 8
"""Tokens of that room."""
PAID = 64
"""Packed tokens that have saved more bytes than that room takes."""


def next_memory(
    memory: TokenMemory, tail_start: int, held: int, spare: int, x: Tensor, start: int
) -> tuple[TokenMemory, int]:
    """Return where the tail from `start` on lies with new tokens, and the room behind them.

    `memory`, `tail_start`, `held`, `spare`: as the stream has them (`held` is its length). Room is
    written to at once: no view reaches there.
    """
    new = x.shape[2]
    length, kept = held + new, max(held - start, 0)
    if kept and spare >= new and (start == tail_start or spare > SLACK):
        memory.tokens(held, length).copy_(x)
        return memory, spare - new
    if start > held:
        x = x[:, :, start - held :]
    if new > MOST_STEP or start < PAID or start == length:
        # A slice would keep the whole of `x` alive behind it.
        tail = torch.cat([memory.tokens(start, held), x], 2) if kept else x.clone()
        return TokenMemory(tail, start), 0
    shape, count = x.shape, length - start
    room = SLACK if start > FEW else 2  # which is next to nothing of what few tokens take
    tail = x.new_zeros(*shape[:2], count + room, shape[3])
    if kept:
        tail[:, :, :kept] = memory.tokens(start, held)
    tail[:, :, kept:count] = x
    return TokenMemory(tail, start), room
