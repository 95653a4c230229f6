"""Bit order of packed codes; these torch bodies define the bytes.

A width of 3, 5, 6 or 7 bits is split into planes of 4, 2 and 1 bits, the low bits first:
3 = 2 + 1, 5 = 4 + 1, 6 = 4 + 2, 7 = 4 + 2 + 1. Within a 32-bit word of a plane of width w, item i
has the bits `w*i … w*i + w - 1`. Nothing straddles a word.

*Interleaved* codes are those of which kernels make wider ones of C bits (4 or 8), 32 / C to a word.
A word of a plane of width w holds the bits of C / w such wider words: item m of wider word q has
the place `m*C/w + q`. So a shift and a mask give all items of a wider word at once, each in place.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kvpact.errors import FormatError

_PLANES = {1: (1,), 2: (2,), 3: (2, 1), 4: (4,), 5: (4, 1), 6: (4, 2), 7: (4, 2, 1), 8: (8,)}
WORD = 32

Blocks = tuple[tuple[int, int], ...]
"""Channels and bits of each block of channels, in their order."""


def planes(bits: int) -> tuple[int, ...]:
    """Return the widths of the planes of a code, the lowest bits first."""
    return _PLANES[bits]


def _join(items: Tensor, width: int, interleave: int) -> Tensor:
    """Put the last axis (`32 / width` codes) into one word each."""
    if interleave:
        items = torch.unflatten(items, -1, (-1, WORD // interleave)).mT.flatten(-2)
    shifts = torch.arange(0, WORD, width, dtype=torch.int32, device=items.device)
    # Bits don't overlap, so the sum is an OR (two's complement takes the sign bit along).
    return (items.to(torch.int32) << shifts).sum(-1, dtype=torch.int32)


def _split(words: Tensor, width: int, interleave: int) -> Tensor:
    """Undo `_join`: a new last axis with the `32 / width` codes of each word, uint8."""
    shifts = torch.arange(0, WORD, width, dtype=torch.int32, device=words.device)
    items = ((words.unsqueeze(-1) >> shifts) & ((1 << width) - 1)).to(torch.uint8)
    if interleave:
        items = torch.unflatten(items, -1, (WORD // interleave, -1)).mT.flatten(-2)
    return items


def plane_runs(blocks: Blocks) -> list[tuple[int, list[tuple[int, int, int]]]]:
    """Return what lies together, in its order: a width, and the parts (block, shift, channels).

    Planes of one bit are one run at the end, so that small blocks take no more bits than they have.
    """
    runs: list[tuple[int, list[tuple[int, int, int]]]] = []
    single: list[tuple[int, int, int]] = []
    for block, (dim, bits) in enumerate(blocks):
        shift = 0
        for width in planes(bits) if bits else ():
            if width == 1:
                single.append((block, shift, dim))
            else:
                runs.append((width, [(block, shift, dim)]))
            shift += width
    return [*runs, (1, single)] if single else runs


def block_words(blocks: Blocks) -> int:
    """Return the words that one token's codes of all blocks take."""
    runs = plane_runs(blocks)
    return sum(-(-sum(dim for *_, dim in parts) * width // WORD) for width, parts in runs)


def pack_blocks_by_token(codes: Tensor, blocks: Blocks, interleave: int = 0) -> Tensor:
    """Pack blocks' codes `[..., 32, dim]` uint8, 16 tokens by side: `[..., 2, words, 16]` int32."""
    held = torch.split(codes, [dim for dim, _ in blocks], -1)
    out = []
    for width, parts in plane_runs(blocks):
        mask = (1 << width) - 1
        plane = torch.cat([(held[block] >> shift) & mask for block, shift, _ in parts], -1)
        per_word = WORD // width  # zeros fill up the last word
        plane = torch.nn.functional.pad(plane, (0, -plane.shape[-1] % per_word))
        out.append(_join(torch.unflatten(plane, -1, (-1, per_word)), width, interleave))
    return torch.unflatten(torch.cat(out, dim=-1), -2, (2, 16)).mT


def unpack_blocks_by_token(words: Tensor, blocks: Blocks, interleave: int = 0) -> Tensor:
    """Undo `pack_blocks_by_token`: `[..., 32, channels of all blocks]` uint8."""
    words = words.mT.flatten(-3, -2)
    codes = [words.new_zeros(*words.shape[:-1], dim, dtype=torch.uint8) for dim, _ in blocks]
    first = 0
    for width, parts in plane_runs(blocks):
        dims = [dim for *_, dim in parts]
        count = -(-sum(dims) * width // WORD)
        plane = _split(words[..., first : first + count], width, interleave).flatten(-2)
        for (block, shift, _), part in zip(
            parts, torch.split(plane[..., : sum(dims)], dims, -1), strict=True
        ):
            codes[block] |= part << shift
        first += count
    return torch.cat(codes, -1)


def pack_by_channel(codes: Tensor, bits: int, interleave: int = 0) -> Tensor:
    """Pack `[..., 32, dim]` uint8 codes to `[..., bits, dim]` int32: channels side by side."""
    out, shift = [], 0
    for width in planes(bits):
        part = (codes >> shift) & ((1 << width) - 1)
        items = torch.unflatten(part, -2, (width, WORD // width)).mT
        out.append(_join(items, width, interleave))
        shift += width
    return torch.cat(out, dim=-2)


def unpack_by_channel(words: Tensor, bits: int, interleave: int = 0) -> Tensor:
    """Undo `pack_by_channel`: `[..., 32, dim]` uint8."""
    codes, shift, first = None, 0, 0
    for width in planes(bits):
        part = _split(words[..., first : first + width, :], width, interleave).mT.flatten(-3, -2)
        codes = part if codes is None else codes | (part << shift)
        shift += width
        first += width
    assert codes is not None
    return codes


def pack_bits(codes: Tensor, widths: Sequence[int], heads: int, size: int) -> Tensor:
    """Return codes `[B, T, N]` as one string of bits, `[B, heads, T, size]` uint8.

    Code after code of 0 to 8 bits, the lowest bit first. Raises `FormatError` where it does not
    fit.
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
