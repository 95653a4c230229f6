"""Codes and side information of some tokens of a tile into their slots, in place.

The slots of tokens that are not there yet are zero. A word of V's codes holds several tokens, so it
is read, added to and written by the one program that has it.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def plane_of(codes, PLANE: tl.constexpr, FORM: tl.constexpr):
    """Return the bits of codes that are in a plane."""
    return (codes >> FORM.plane_shift(PLANE)) & ((1 << FORM.plane_width(PLANE)) - 1)


@triton.jit
def _plane_of_tokens(
    words, codes, inside, live, PLANE: tl.constexpr, ROWS: tl.constexpr, FORM: tl.constexpr
):
    """Store a plane of codes `[ROWS, padded]` where a word holds channels of one token."""
    WIDTH: tl.constexpr = FORM.plane_width(PLANE)
    FIRST: tl.constexpr = FORM.plane_words(PLANE)
    PER: tl.constexpr = 32 // WIDTH
    COUNT: tl.constexpr = FORM.padded // PER
    part = plane_of(codes, PLANE, FORM)
    shifts = (tl.arange(0, PER) * WIDTH)[None, None, :]
    joined = tl.sum(part.reshape(ROWS, COUNT, PER) << shifts, 2)
    w = tl.arange(0, COUNT)
    place = words + (inside // 16 * (FORM.words * 16) + inside % 16)[:, None]
    mask = live[:, None] & (w * PER < FORM.dim)[None, :]
    tl.store(place + ((FIRST + w) * 16)[None, :], joined, mask=mask)


@triton.jit
def _plane_of_channels(
    words, codes, first, PLANE: tl.constexpr, ROWS: tl.constexpr, FORM: tl.constexpr
):
    """Add a plane of codes `[ROWS, padded]` where a word holds tokens of one channel."""
    WIDTH: tl.constexpr = FORM.plane_width(PLANE)
    PER: tl.constexpr = 32 // WIDTH
    TOKENS: tl.constexpr = ROWS if ROWS < PER else PER
    COUNT: tl.constexpr = ROWS // TOKENS
    part = plane_of(codes, PLANE, FORM)
    d = tl.arange(0, FORM.padded)
    shifts = ((first % PER + tl.arange(0, TOKENS)) * WIDTH)[None, :, None]
    joined = tl.sum(part.reshape(COUNT, TOKENS, FORM.padded) << shifts, 1)
    r = FORM.plane_shift(PLANE) + first // PER + tl.arange(0, COUNT)
    place = words + (r * FORM.dim)[:, None] + d[None, :]
    inside = (d < FORM.dim)[None, :]
    tl.store(place, tl.load(place, mask=inside, other=0) | joined, mask=inside)


@triton.jit
def store_codes(units, tile, codes, first, live, ROWS: tl.constexpr, FORM: tl.constexpr):
    """Store the codes of tokens into a tile.

    `units`: to the codes of a segment and head: int32, or uint8 where `FORM.order` is ``number``;
    `codes`: int32 `[ROWS, padded]`; `first`: the place in the tile of the first token; `live`:
    `[ROWS]`: which tokens are to be stored.
    """
    d, inside = tl.arange(0, FORM.padded), first + tl.arange(0, ROWS)
    mask = live[:, None] & (d < FORM.dim)[None, :]
    if FORM.order == "number":
        place = units + tile * (FORM.dim * 32) + (d * 32)[None, :] + inside[:, None]
        tl.store(place, codes.to(tl.uint8), mask=mask)
    elif FORM.order == "token":
        codes = tl.where(mask, codes, 0)
        words = units + tile * (FORM.words * 32)
        for plane in tl.static_range(FORM.plane_count()):
            _plane_of_tokens(words, codes, inside, live, plane, ROWS, FORM)
    else:
        codes = tl.where(mask, codes, 0)
        words = units + tile * (FORM.bits * FORM.dim)
        for plane in tl.static_range(FORM.plane_count()):
            _plane_of_channels(words, codes, first, plane, ROWS, FORM)


@triton.jit
def store_numbers(
    units, tile, numbers, first, live, COUNT: tl.constexpr, ROWS: tl.constexpr, GROUPS: tl.constexpr
):
    """Store the first `COUNT` of fp16 numbers `[ROWS, GROUPS]` of tokens; units `[COUNT, 32]`."""
    g = tl.arange(0, GROUPS)
    inside = first + tl.arange(0, ROWS)
    place = units + tile * (COUNT * 32) + (g * 32)[None, :] + inside[:, None]
    tl.store(place, numbers, mask=live[:, None] & (g < COUNT)[None, :])
