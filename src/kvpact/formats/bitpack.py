"""Bit order of packed codes; these torch bodies define the bytes.

A width of 3, 5, 6 or 7 bits is split into planes of 4, 2 and 1 bits, the low bits first:
3 = 2 + 1, 5 = 4 + 1, 6 = 4 + 2, 7 = 4 + 2 + 1. Within a 32-bit word of a plane of width w, item i
has the bits `w*i … w*i + w - 1`. Nothing straddles a word.
"""

from __future__ import annotations

import torch
from torch import Tensor

_PLANES = {1: (1,), 2: (2,), 3: (2, 1), 4: (4,), 5: (4, 1), 6: (4, 2), 7: (4, 2, 1), 8: (8,)}
WORD = 32


def planes(bits: int) -> tuple[int, ...]:
    """Return the widths of the planes of a code, the lowest bits first."""
    return _PLANES[bits]


def words_per_token(bits: int, dim: int) -> int:
    """Return the 32-bit words that one token's `dim` codes take, channel by channel."""
    return sum(-(-dim * width // WORD) for width in planes(bits))


def _join(items: Tensor, width: int) -> Tensor:
    """Put the last axis (`32 / width` codes) into one word each."""
    shifts = torch.arange(0, WORD, width, dtype=torch.int32, device=items.device)
    # Bits don't overlap, so the sum is an OR (two's complement takes the sign bit along).
    return (items.to(torch.int32) << shifts).sum(-1, dtype=torch.int32)


def _split(words: Tensor, width: int) -> Tensor:
    """Undo `_join`: a new last axis with the `32 / width` codes of each word, uint8."""
    shifts = torch.arange(0, WORD, width, dtype=torch.int32, device=words.device)
    return ((words.unsqueeze(-1) >> shifts) & ((1 << width) - 1)).to(torch.uint8)


def pack_by_token(codes: Tensor, bits: int) -> Tensor:
    """Pack `[..., 32, dim]` uint8 codes to `[..., 2, words, 16]` int32: 16 tokens side by side."""
    out, shift = [], 0
    for width in planes(bits):
        per_word = WORD // width
        part = (codes >> shift) & ((1 << width) - 1)
        part = torch.nn.functional.pad(part, (0, -codes.shape[-1] % per_word))
        out.append(_join(torch.unflatten(part, -1, (-1, per_word)), width))
        shift += width
    return torch.unflatten(torch.cat(out, dim=-1), -2, (2, 16)).mT


def unpack_by_token(words: Tensor, bits: int, dim: int) -> Tensor:
    """Undo `pack_by_token`: `[..., 32, dim]` uint8."""
    words = words.mT.flatten(-3, -2)
    codes, shift, first = None, 0, 0
    for width in planes(bits):
        count = -(-dim * width // WORD)
        part = _split(words[..., first : first + count], width).flatten(-2)[..., :dim]
        codes = part if codes is None else codes | (part << shift)
        shift += width
        first += count
    assert codes is not None
    return codes


def pack_by_channel(codes: Tensor, bits: int) -> Tensor:
    """Pack `[..., 32, dim]` uint8 codes to `[..., bits, dim]` int32: channels side by side."""
    out, shift = [], 0
    for width in planes(bits):
        part = (codes >> shift) & ((1 << width) - 1)
        out.append(_join(torch.unflatten(part, -2, (width, WORD // width)).mT, width))
        shift += width
    return torch.cat(out, dim=-2)


def unpack_by_channel(words: Tensor, bits: int) -> Tensor:
    """Undo `pack_by_channel`: `[..., 32, dim]` uint8."""
    codes, shift, first = None, 0, 0
    for width in planes(bits):
        part = _split(words[..., first : first + width, :], width).mT.flatten(-3, -2)
        codes = part if codes is None else codes | (part << shift)
        shift += width
        first += width
    assert codes is not None
    return codes
