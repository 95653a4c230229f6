"""Scores of an index over its packed keys, by which attention chooses tokens (DeepSeek V3.2).

The sum, over the heads of the index, of the products that are positive, times the head's weight.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvpact.kernels.cpu.backend import CPU
from kvpact.kernels.cpu.index import covers, scan
from kvpact.quantizers.channels import from_integers


def index_scores(
    codes: Tensor,
    scale: Tensor,
    q: Tensor,
    weight: Tensor | None,
    requested: str = "auto",
    room: int = 0,
) -> Tensor:
    """Return fp32 scores `[B, S, n + room]` of packed keys, without weights `[B, S, H, n + room]`.

    `codes`, `scale`: of `to_integers`; `q`: `[B, S, H, D]` fp32; `weight`: `[B, S, H]`. The room is
    not written. Native kernels round queries to 16 bits: scores differ by less than 1e-4 of the
    largest.
    """
    tokens = codes.shape[1]
    shape = (*q.shape[: 2 if weight is not None else 3], tokens + room)
    out = torch.empty(shape, dtype=torch.float32, device=q.device)
    if requested in ("auto", "cpu") and covers(codes, scale, q) and not CPU.runs_here(q.device):
        scan(codes, scale, q, weight, out)
    else:
        out[..., :tokens] = torch_scores(codes, scale, q, weight)
    return out


def torch_scores(codes: Tensor, scale: Tensor, q: Tensor, weight: Tensor | None) -> Tensor:
    """Do what `index_scores` does in torch, which defines the result."""
    products = q @ from_integers(codes, scale, 1, 0).mT.unsqueeze(1)
    if weight is None:
        return products
    return (weight.unsqueeze(-2) @ products.relu()).squeeze(-2)
