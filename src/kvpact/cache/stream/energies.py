"""Energies of queries, which codecs of keys learn from."""

from __future__ import annotations

import torch
from torch import Tensor

from kvpact.arithmetic import divide
from kvpact.methods.context import Context

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
