"""Sinks: the first tokens of each row, which stay exact."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor


@lru_cache(maxsize=64)
def _first_tokens(batch: int, count: int, device: torch.device) -> Tensor:
    return torch.arange(count, dtype=torch.int64, device=device).expand(batch, -1).contiguous()


def sink_positions(
    batch: int, count: int, device: torch.device, padding: Tensor | None
) -> tuple[Tensor, int]:
    """Return where each row's sink tokens stand, `[B, S]`, and the position after the last."""
    if padding is None:
        return _first_tokens(batch, count, device), count
    positions = padding.unsqueeze(1) + torch.arange(count, dtype=torch.int64, device="cpu")
    return positions.to(device), int(padding.max()) + count


def filled_sinks(sinks: Tensor, x: Tensor, place: Tensor) -> Tensor:
    """Return sinks with those of `x` (`[B, H, T, D]`) at `place` (`[B, S]`), where that is in x."""
    among = (place >= 0) & (place < x.shape[2])
    # No host read: every sink takes a token, and those that are not among these keep their own.
    index = torch.where(among, place, 0)[:, None, :, None]
    taken = x.gather(2, index.expand(-1, x.shape[1], -1, x.shape[3]))
    return torch.where(among[:, None, :, None], taken.to(sinks.dtype), sinks)


def sinks_among(known: Tensor, positions: Tensor) -> Tensor:
    """Return sinks that stand at `positions` among the first tokens, zero where these are fewer."""
    batch, heads, held, dim = known.shape
    zeros = known.new_zeros(batch, heads, positions.shape[1], dim)
    return filled_sinks(zeros, known, positions) if held else zeros
