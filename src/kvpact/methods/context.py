"""The first tokens of a cache: which of them count for what a group, or a codec, learns."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from kvpact.arithmetic import tree_sum


class Context(NamedTuple):
    """Facts about a cache's first tokens: their `padding`, and first ones held exactly (`sinks`).

    `query_energy`: `[H_kv, D]` fp32, the mean square of queries; None where none were seen.
    """

    padding: Tensor | None = None
    sinks: int = 0
    query_energy: Tensor | None = None

    @property
    def end(self) -> int:
        """No padding and no attention sink stands at or after this position."""
        return self.sinks + (0 if self.padding is None else int(self.padding.max()))

    def counted(self, x: Tensor, start: int = 0) -> Tensor:
        """Return `[B, 1, T, 1]`: which tokens from `start` on are neither padding nor sinks."""
        batch, _, tokens, _ = x.shape
        if self.padding is None:
            return _from(self.sinks, batch, start, tokens, x.device)
        first = self.sinks + self.padding.to(x.device).view(-1, 1)
        places = torch.arange(start, start + tokens, dtype=torch.int64, device=x.device)
        return (places >= first).view(batch, 1, tokens, 1)

    def first(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return each row's first real token, `[B, H, 1, D]`, and which rows have theirs in `x`."""
        batch, heads, tokens, dim = x.shape
        place = torch.zeros(batch, dtype=torch.int64, device=x.device)
        if self.padding is not None:
            place = place + self.padding.to(x.device)
        index = place.clamp(0, tokens - 1).view(-1, 1, 1, 1).expand(batch, heads, 1, dim)
        return x.gather(2, index), place < tokens

    def ordinary(self, x: Tensor, group: int) -> Tensor:
        """Return whole groups from position 0 on, with the mean of others for sinks and padding.

        Sinks would stretch the grid of their group or move its mean; the mean of the others does
        neither.
        """
        groups = torch.unflatten(x.to(torch.float32), 2, (-1, group))
        inside = torch.unflatten(self.counted(x), 2, (-1, group))
        count = inside.sum(3, keepdim=True).clamp(min=1).to(torch.float32)
        mean = tree_sum(torch.where(inside, groups, torch.zeros_like(groups)), 3) / count
        return torch.where(inside, groups, mean).flatten(2, 3).to(x.dtype)


@lru_cache(maxsize=64)
def _from(first: int, batch: int, start: int, tokens: int, device: torch.device) -> Tensor:
    """Return `[B, 1, T, 1]`: which of the tokens from `start` on stand at `first` or after."""
    places = torch.arange(start, start + tokens, dtype=torch.int64, device=device)
    return (places >= first).view(1, 1, tokens, 1).expand(batch, -1, -1, -1)


def mean_over_tokens(x: Tensor, counted: Tensor) -> Tensor:
    """Return the mean over rows and the tokens counted of `[B, H, T, D]`: `[H, D]`."""
    total = tree_sum(tree_sum(x * counted, 2), 0)[0, :, 0]
    return total / counted.sum().clamp(min=1).to(total.dtype)
