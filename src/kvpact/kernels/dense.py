"""Dense tokens as compiled kernels read and write them."""

from __future__ import annotations

import torch
from torch import Tensor

from kvpact.errors import DtypeError, GeometryError

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def check_out(out: Tensor, start: int, end: int, dim: int) -> None:
    """Check what tokens are decoded into (see `Backend.decode`).

    `out`: `[B, H, end - start, dim]`, the channels side by side.
    """
    if out.dim() != 4 or not 0 <= start <= end or out.shape[2] != end - start:
        raise GeometryError(f"out has shape {tuple(out.shape)}, not [B, H, {end - start}, D]")
    if out.dtype not in DTYPES:
        raise DtypeError(f"out is {out.dtype}; numbers are decoded to fp32, fp16 or bf16")
    if out.stride(3) != 1 and out.shape[3] != 1:
        raise GeometryError("the last axis of out has gaps")
    if dim != out.shape[3]:
        raise GeometryError(f"out is {out.shape[3]} wide, vectors are {dim}")
