"""Operations as plain torch bodies: what an optimised kernel has to reproduce.

What decides on stored bytes is written with elementwise operations in a fixed order, never with
a matrix product or a library reduction: those may round differently for other shapes, threads or
devices, and then the same tokens would be stored as other bytes.
"""

from __future__ import annotations

import torch
from torch import Tensor


def divide(x: Tensor, number: float) -> Tensor:
    """Divide, correctly rounded; on a GPU `x / number` is a product with the reciprocal."""
    return x / torch.full((), number, dtype=x.dtype, device=x.device)


def saturated(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Cast decompressed numbers; what rounding took beyond fp16's range becomes its largest."""
    if dtype == torch.float16:
        limit = torch.finfo(dtype).max
        x = x.clamp(-limit, limit)
    return x.to(dtype)


def square_root(x: Tensor) -> Tensor:
    """Take the square root of fp32, correctly rounded on every device, as `x.sqrt()` may not be."""
    # No root of an fp32 number lies so near to the middle of two that fp64 could not tell.
    return x.double().sqrt().to(x.dtype)


def tree_sum(x: Tensor, dim: int = -1) -> Tensor:
    """Sum over `dim` (kept, size 1), pairwise and in a fixed order; of none the sum is 0."""
    size = x.shape[dim]
    if size == 0:
        return x.sum(dim, keepdim=True)
    while size > 1:
        half = size // 2
        summed = x.narrow(dim, 0, half) + x.narrow(dim, half, half)
        x = torch.cat([summed, x.narrow(dim, size - 1, 1)], dim) if size % 2 else summed
        size = x.shape[dim]
    return x


def hadamard(x: Tensor) -> Tensor:
    """Apply the orthonormal Walsh-Hadamard transform to the last axis; it is its own inverse."""
    n = x.shape[-1]
    if n & (n - 1):
        raise ValueError(f"the Hadamard transform needs a power of two, not {n}")
    shape, step = x.shape, 1
    while step < n:
        pairs = x.reshape(-1, n // (2 * step), 2, step)
        low, high = pairs[:, :, 0], pairs[:, :, 1]
        x = torch.stack((low + high, low - high), dim=2)
        step *= 2
    return (x * float(n**-0.5)).reshape(shape)
