"""What a stream's tokens are: sinks, and energies of queries."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from kvpact.arithmetic import divide
from kvpact.methods.context import Context


@lru_cache(maxsize=64)
def _first_tokens(batch: int, count: int, device: torch.device) -> Tensor:
    return torch.arange(count, dtype=torch.int64, device=device).expand(batch, -1).contiguous()


def sink_positions(
    batch: int, count: int, device: torch.device, padding: Tensor | None
) -> tuple[Tensor, int]:
    """Return where each row's sink tokens stand, `[B, S]`, and the position behind the last."""
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


E5M2 = torch.float8_e5m2
_LARGEST = torch.finfo(E5M2).max


def energies(q: Tensor, kv_heads: int) -> Tensor:
    """Return the mean squares over the query heads of each KV head, `[B, H_kv, T, D]` uint8."""
    batch, _, tokens, dim = q.shape
    each = q.to(torch.float32).square().reshape(batch, kv_heads, -1, tokens, dim)
    first, *others = each.unbind(2)
    mean = divide(sum(others, start=first), float(1 + len(others)))
    return mean.clamp_(max=_LARGEST).to(E5M2).view(torch.uint8)


def mean_energy(seen: Tensor, start: int, context: Context) -> Tensor:
    """Return the mean over rows and tokens, those from `start` on, that count: `[H_kv, D]` fp32."""
    # Sums of so few 8-bit floats are exact in fp64, in whatever order.
    each = seen.view(E5M2).to(torch.float64)
    if start >= context.end:
        return divide(each.sum((0, 2)), float(each.shape[0] * each.shape[2])).to(torch.float32)
    counted = context.counted(each, start).to(torch.float64)
    return ((each * counted).sum((0, 2)) / counted.sum().clamp(min=1)).to(torch.float32)
