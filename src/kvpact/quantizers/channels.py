"""8-bit integers with a scale per channel over 64 tokens: what keeps exact tensors smaller.

For what no method of K and V is made for: windows at rest, and the keys of an index.
"""

from __future__ import annotations

import torch
from torch import Tensor

GROUP = 64
"""Tokens that share a scale."""


def to_integers(x: Tensor, axis: int, first: int) -> tuple[Tensor, Tensor]:
    """Return int8 and float32 scales of `GROUP` tokens of `axis`, the first of number `first`."""
    grouped = _grouped(x.float().movedim(axis, 0), first)
    scale = grouped.abs().amax(1) / 127
    codes = (grouped / scale.clamp_min(torch.finfo(torch.float32).tiny)[:, None]).round()
    codes = codes.to(torch.int8).flatten(0, 1)[first % GROUP :][: x.shape[axis]]
    return codes.movedim(0, axis).contiguous(), scale.movedim(0, axis).contiguous()


def from_integers(codes: Tensor, scale: Tensor, axis: int, first: int) -> Tensor:
    """Return what `to_integers` took, rounded, as float32."""
    grouped = _grouped(codes.float().movedim(axis, 0), first) * scale.movedim(axis, 0)[:, None]
    x = grouped.flatten(0, 1)[first % GROUP :][: codes.shape[axis]]
    return x.movedim(0, axis).contiguous()


def _grouped(x: Tensor, first: int) -> Tensor:
    """Return `[tokens, …]` as `[groups, GROUP, …]`, zeros where a group has no token."""
    lead, count = first % GROUP, x.shape[0]
    groups = -(-(lead + count) // GROUP)
    padded = x.new_zeros(groups * GROUP, *x.shape[1:])
    padded[lead : lead + count] = x
    return padded.view(groups, GROUP, *x.shape[1:])
