"""Codes of unlike widths as one string of bits per token, shared out evenly among the heads."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kvpact.errors import FormatError


def pack_bits(codes: Tensor, widths: Sequence[int], heads: int, size: int) -> Tensor:
    """Return the bytes of codes, one code behind the other, the lowest bit of each first.

    `codes`: `[B, T, N]` uint8; bits beyond a code's width are zero. `widths`: bits of each of the N
    codes, 0 to 8. `heads`, `size`: each head takes `size` bytes of the string, which has zeros at
    its end. Returns `[B, heads, T, size]` uint8. Bit i of the string is bit `i % 8` of byte
    `i // 8`. Raises `FormatError`.
    """
    which, shift = _places(widths, codes.device)
    if len(which) > 8 * heads * size:
        raise FormatError(f"{len(which)} bits do not fit {heads} times {size} bytes")
    bits = codes[..., which] >> shift & 1
    bits = torch.nn.functional.pad(bits, (0, 8 * heads * size - bits.shape[-1]))
    weights = (1 << torch.arange(8, dtype=torch.int64, device=codes.device)).to(torch.uint8)
    grouped = torch.unflatten(bits, -1, (heads, size, 8)) * weights
    return grouped.sum(-1, dtype=torch.uint8).transpose(1, 2).contiguous()


def unpack_bits(data: Tensor, widths: Sequence[int]) -> Tensor:
    """Undo `pack_bits`: `[B, T, N]` uint8 of `[B, heads, T, size]`."""
    which, shift = _places(widths, data.device)
    places = torch.arange(8, dtype=torch.int64, device=data.device).to(torch.uint8)
    bits = (data.transpose(1, 2).flatten(2).unsqueeze(-1) >> places & 1).flatten(2)
    shown = bits[..., : len(which)] << shift
    codes = shown.new_zeros(*shown.shape[:2], len(widths))
    return codes.index_add_(2, which, shown)


def _places(widths: Sequence[int], device: torch.device) -> tuple[Tensor, Tensor]:
    """Return of each bit of the string the code that it is of, and its place in that."""
    count = torch.tensor(widths, dtype=torch.int64, device="cpu")
    which = torch.arange(len(count), dtype=torch.int64, device="cpu").repeat_interleave(count)
    begin = count.cumsum(0) - count
    shift = torch.arange(len(which), dtype=torch.int64, device="cpu") - begin[which]
    return which.to(device), shift.to(device=device, dtype=torch.uint8)
