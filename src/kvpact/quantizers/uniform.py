"""Uniform quantisers over the last axis: one scale (and zero) for each slice of it.

A method chooses what the last axis is: channels of one token, or one channel of a group of tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvpact.arithmetic import divide
from kvpact.quantizers.numbers import half


def _round_half_away(x: Tensor) -> Tensor:
    """Round to nearest, ties away from zero, as GGUF's quantisers do."""
    magnitude = x.abs()
    floored = magnitude.floor()
    return torch.copysign(floored + (2 * (magnitude - floored)).floor(), x)


def _reciprocal(scale: Tensor) -> Tensor:
    """Return `1 / scale`, or 0 where that is no number: codes of such values all mean zero."""
    inverse = 1.0 / scale
    return torch.where(inverse.isinf(), torch.zeros_like(scale), inverse)


def quantize_symmetric(x: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Return uint8 codes of `[..., n]` and fp16 scales, as GGUF's q8_0 and q4_0 (fewer bits) have.

    At 8 bits the largest magnitude becomes 127, else that value becomes `-2**(bits - 1)`.
    """
    offset = 1 << (bits - 1)
    if bits == 8:
        scale = divide(x.abs().amax(-1, keepdim=True), 127)
        codes = _round_half_away(x * _reciprocal(scale)) + offset
    else:
        extreme = x.gather(-1, x.abs().argmax(-1, keepdim=True))
        scale = extreme / -offset
        codes = (x * _reciprocal(scale) + (offset + 0.5)).trunc()
    codes = codes.clamp(0, 2 * offset - 1).to(torch.uint8)
    return codes, half(scale, "scale of a group")


def affine_grid(x: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Return scale and zero, `[..., 1]` fp16 each, that span the values of `[..., n]`."""
    low, high = x.amin(-1, keepdim=True), x.amax(-1, keepdim=True)
    scale = divide(high - low, (1 << bits) - 1)
    # Which zero is the least of 0.0 and -0.0 depends on the order: the sum is 0.0.
    return half(scale, "scale of a group"), half(low + 0.0, "zero of a group")


def quantize_affine(x: Tensor, scale: Tensor, zero: Tensor, bits: int) -> Tensor:
    """Return uint8 codes of `x` on the fp16 grid `zero + code * scale`, or its nearest end."""
    scale, zero = scale.to(torch.float32), zero.to(torch.float32)
    codes = ((x - zero) * _reciprocal(scale)).round()
    return codes.clamp(0, (1 << bits) - 1).to(torch.uint8)
