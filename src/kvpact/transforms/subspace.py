"""Principal directions of vectors: the truncated SVD, and projecting on it.

The right singular vectors of a matrix X are the eigenvectors of `X^T X`, its squared singular
values the eigenvalues. That matrix is D x D whatever the number of tokens; in float64 it loses
directions only below 1e-8 of the largest singular value, less than fp32 holds.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvpact.errors import GeometryError


def principal_directions(x: Tensor, per_head: bool) -> tuple[Tensor, Tensor]:
    """Return falling energies `[H or 1, D]` and right singular vectors of tokens, in fp64."""
    gram = torch.zeros(x.shape[1], x.shape[3], x.shape[3], dtype=torch.float64, device=x.device)
    for row in x:
        for head, vectors in enumerate(row):
            vectors = vectors.double()
            gram[head] += vectors.mT @ vectors
    if not per_head:
        gram = gram.sum(0, keepdim=True)
    # LAPACK may not converge where numbers are near the ends of their range.
    size = gram.diagonal(dim1=-2, dim2=-1).amax(-1).clamp(min=torch.finfo(gram.dtype).tiny)
    energy, directions = torch.linalg.eigh(gram / size[:, None, None])
    return energy.flip(-1).clamp(min=0) * size[:, None], directions.flip(-1)


def check_heads(table: Tensor, x: Tensor) -> None:
    """Raise `GeometryError` unless a table with `[H or 1, …]` rows fits tokens `[B, H, T, …]`."""
    if table.shape[0] not in (1, x.shape[1]):
        raise GeometryError(
            f"the codec was fitted to {table.shape[0]} heads, these tokens have {x.shape[1]}"
        )


def project(x: Tensor, basis: Tensor) -> Tensor:
    """Return the coefficients `[B, H, T, R]` of tokens on a basis, the same bits in any batch."""
    check_heads(basis, x)
    basis = basis.to(torch.float32)
    # One channel after the other: a matrix product may round differently for other shapes.
    total = x.new_zeros(*x.shape[:3], basis.shape[2])
    for channel in range(x.shape[3]):
        total = total + x[..., channel : channel + 1] * basis[:, channel].unsqueeze(-2)
    return total


def expand(coefficients: Tensor, basis: Tensor) -> Tensor:
    """Return the vectors `[B, H, T, D]` fp32 of coefficients `[B, H, T, R]`."""
    check_heads(basis, coefficients)
    return (coefficients.double() @ basis.double().mT).to(torch.float32)
