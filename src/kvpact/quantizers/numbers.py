"""Casts of side information and of whole values, with a named error where they overflow."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from kvpact.errors import NonFiniteError
from kvpact.quantizers.checks import require, require_finite

FP8 = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
HALF_MAX = torch.finfo(torch.float16).max


def all_finite(x: Tensor) -> bool:
    """Return whether a tensor has neither NaN nor infinity; many times faster than `isfinite`."""
    if x.is_meta or not x.numel():
        return True
    low, high = torch.aminmax(x)  # both are NaN where one number is
    return bool((low > -math.inf) & (high < math.inf))


def cast(x: Tensor, dtype: torch.dtype, what: str) -> Tensor:
    """Cast finite values to `dtype`. `dtype`: fp16, bf16 or fp32. Raises `NonFiniteError`."""
    y = x.to(dtype)
    require_finite(
        y,
        lambda: NonFiniteError(
            f"{what}: magnitude {x.abs().max():.4g} is beyond {dtype} "
            f"({torch.finfo(dtype).max:.6g}); scale the input down or keep this layer at 'none'"
        ),
    )
    return y


def half(x: Tensor, what: str) -> Tensor:
    """Cast side information to fp16; see `cast`."""
    return cast(x, torch.float16, what)


def to_fp8(x: Tensor, kind: str, saturate: bool) -> Tensor:
    """Round to fp8 bytes, uint8; beyond the largest number clamp (`saturate`) or raise."""
    limit = torch.finfo(FP8[kind]).max
    if not saturate:
        require(
            (x.abs() <= limit).all(),
            lambda: NonFiniteError(
                f"fp8 {kind} without a scale holds magnitudes up to {limit:g}, not "
                f"{x.abs().max():.4g}; use scale=token"
            ),
        )
    return x.clamp(-limit, limit).to(FP8[kind]).view(torch.uint8)


def from_fp8(codes: Tensor, kind: str) -> Tensor:
    """Undo `to_fp8`: fp32."""
    return codes.contiguous().view(FP8[kind]).to(torch.float32)


LARGEST_E5M3 = 61_440.0
"""The largest number of `to_e5m3`."""
_LEAST_E5M3 = (127 - 16) * 8  # exponent -16 in the upper bits of fp32


def to_e5m3(x: Tensor, what: str) -> Tensor:
    """Round magnitudes to uint8: 5 bits of exponent, 3 of mantissa. Raises `NonFiniteError`.

    `8 (e + 16) + m` stands for `2^e (1 + m / 8)`, 0 for what is below about `2^-16`; ties go to
    even.
    """
    bits = x.contiguous().view(torch.int32)
    rounded = (bits + 0x7FFFF + (bits >> 20 & 1)) >> 20
    byte = (rounded - _LEAST_E5M3).clamp(min=0)
    require(
        (byte < 256).all(),
        lambda: NonFiniteError(
            f"{what}: magnitude {x.max():.4g} is beyond the {LARGEST_E5M3:g} of its 8 bits; scale "
            "the input down or keep this layer at 'none'"
        ),
    )
    return byte.to(torch.uint8)


def from_e5m3(byte: Tensor) -> Tensor:
    """Undo `to_e5m3`: fp32."""
    number = (byte.to(torch.int32) + _LEAST_E5M3) << 20
    return torch.where(byte == 0, 0, number).view(torch.float32)
