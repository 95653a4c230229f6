"""Attention sinks: the first tokens of each row, which a stream also holds exactly."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from kvpact.cache.stream import Stream


@lru_cache(maxsize=64)
def _first_tokens(batch: int, count: int, device: torch.device) -> Tensor:
    return torch.arange(count, dtype=torch.int64, device=device).expand(batch, -1).contiguous()


def sink_positions(
    batch: int, count: int, device: torch.device, padding: Tensor | None
) -> tuple[Tensor, int]:
    """Return where each row's sink tokens stand, `[B, S]`, and the position behind the last.

    `batch`, `count`: rows, and sinks of each; `padding`: `[B]` left-padding tokens of each row.
    """
    if padding is None:
        return _first_tokens(batch, count, device), count
    positions = padding.unsqueeze(1) + torch.arange(count, dtype=torch.int64, device="cpu")
    return positions.to(device), int(padding.max()) + count


def filled_sinks(sinks: Tensor, x: Tensor, place: Tensor) -> Tensor:
    """Return sinks with those of the tokens `x` (`[B, H, T, D]`) among which they stand at `place`.

    `place` is `[B, S]`; what is no number from 0 to T - 1 is not among them.
    """
    among = (place >= 0) & (place < x.shape[2])
    # No host read: every sink takes a token, and those that are not among these keep their own.
    index = torch.where(among, place, 0)[:, None, :, None]
    taken = x.gather(2, index.expand(-1, x.shape[1], -1, x.shape[3]))
    return torch.where(among[:, None, :, None], taken.to(sinks.dtype), sinks)


def next_sinks(stream: Stream, x: Tensor, start: int, padding: Tensor | None) -> Tensor | None:
    """Return a stream's sinks once its tail begins at `start`, behind new tokens."""
    if not start or not stream.num_sinks:
        return stream.sinks
    if stream.sinks is None:
        whole = padding is None and not stream.length and x.shape[2] >= stream.num_sinks
        return x[:, :, : stream.num_sinks].clone() if whole else first_tokens(stream, padding, x)
    positions, end = stream.sink_positions(padding)
    if stream.length >= end:
        return stream.sinks
    return filled_sinks(stream.sinks, x, positions - stream.length)


def first_tokens(stream: Stream, padding: Tensor | None, x: Tensor | None = None) -> Tensor | None:
    """Return a stream's sinks, also while the tail has them, or new tokens `x` behind it."""
    if stream.sinks is not None or not stream.num_sinks:
        return stream.sinks
    count = stream.num_sinks
    positions, end = stream.sink_positions(padding)
    known = stream.tail[:, :, :end]
    if x is not None and stream.length < end:
        known = torch.cat([known, x[:, :, : end - stream.length]], 2)
    batch, heads, held, dim = known.shape
    if held == count and padding is None:
        return known.clone()
    zeros = known.new_zeros(batch, heads, count, dim)
    return filled_sinks(zeros, known, positions) if held else zeros
