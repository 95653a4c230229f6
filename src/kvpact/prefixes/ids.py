"""Token ids as callers give them, and runs of chunks that are packed together."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kvpact.errors import GeometryError

Tokens = Sequence[int] | Tensor
BATCH = 8
"""Chunks that are packed at once: the memory that saving takes in addition to the cache."""


def token_ids(tokens: Tokens) -> list[int]:
    """Return token ids, `[T]` or `[1, T]`, as a list. Raises `GeometryError`."""
    if not isinstance(tokens, Tensor):
        return list(tokens)
    if tokens.dim() not in (1, 2) or (tokens.dim() == 2 and tokens.shape[0] != 1):
        raise GeometryError(f"token ids should be [T] or [1, T], not {list(tokens.shape)}")
    if tokens.is_floating_point() or tokens.dtype == torch.bool:
        raise GeometryError("token ids should be whole numbers")
    return [int(token) for token in tokens.flatten().tolist()]


def runs(numbers: Sequence[int]) -> list[list[int]]:
    """Return runs of numbers that follow each other, none too long to be packed at once."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and runs[-1][-1] == number - 1 and len(runs[-1]) < BATCH:
            runs[-1].append(number)
        else:
            runs.append([number])
    return runs
