"""Attention sinks: the first tokens of each row, which a stream also holds exactly."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor


@lru_cache(maxsize=64)
def _first_tokens(batch: int, count: int, device: torch.device) -> Tensor:
    return torch.arange(count, dtype=torch.int64, device=device).expand(batch, -1).contiguous()


def sink_positions(sinks: Tensor, padding: Tensor | None) -> tuple[Tensor, int]:
    """Return where each row's sink tokens stand, `[B, S]`, and the position behind the last.

    Parameters
    ----------
    sinks : Tensor
        `[B, H, S, D]`.
    padding : Tensor or None
        `[B]` left-padding tokens of each row.
    """
    batch, _, count, _ = sinks.shape
    if padding is None:
        return _first_tokens(batch, count, sinks.device), count
    positions = padding.unsqueeze(1) + torch.arange(count, dtype=torch.int64, device="cpu")
    return positions.to(sinks.device), int(padding.max()) + count


def filled_sinks(sinks: Tensor, x: Tensor, place: Tensor) -> Tensor:
    """Return sinks with those of the tokens `x` (`[B, H, T, D]`) among which they stand at `place`.

    `place` is `[B, S]`; what is no number from 0 to T - 1 is not among them.
    """
    among = (place >= 0) & (place < x.shape[2])
    # No host read: every sink takes a token, and those that are not among these keep their own.
    index = torch.where(among, place, 0)[:, None, :, None]
    taken = x.gather(2, index.expand(-1, x.shape[1], -1, x.shape[3]))
    return torch.where(among[:, None, :, None], taken.to(sinks.dtype), sinks)
