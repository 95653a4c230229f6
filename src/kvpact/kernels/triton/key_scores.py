"""Scores of a block: products of K's levels and digits of queries, scaled and shifted."""

from __future__ import annotations

import triton
import triton.language as tl

from kvpact.kernels.triton.halves import in_two, key_channels, key_halves, of_halves, summed
from kvpact.kernels.triton.operands import groups_of, key_operand, key_width, level_worth
from kvpact.kernels.triton.tiles import load_per_token
from kvpact.kernels.triton.token_groups import by_section, group_numbers, scaled_scores
from kvpact.kernels.triton.two_digits import whole


@triton.jit
def scales(tiles, live, GROUP: tl.constexpr, VBITS: tl.constexpr):
    """Return the scales, or zeros, fp32 `[N]` of a group of channels."""
    return load_per_token(tiles, live, GROUP * 32, VBITS).to(tl.float32)


@triton.jit
def zeros_of(
    zeros, scale_tiles, live, GROUP: tl.constexpr, FORM: tl.constexpr, VBITS: tl.constexpr
):
    """Return the zeros fp32 `[N]` of a group of channels, for levels as they are multiplied."""
    zero = scales(zeros, live, GROUP, VBITS)
    if FORM.middle != 0.0:
        zero += scales(scale_tiles, live, GROUP, VBITS) * FORM.middle
    return zero


@triton.jit
def load_queries(DIGITS, UNITS, NUMBERS, base, K: tl.constexpr, G: tl.constexpr, KW: tl.constexpr):
    """Load the queries of a KV head, number `base`.

    Returns int8 `[key_width, 2 G]` of each group of channels (fp16 where K's numbers are), and what
    they are worth, `[G]`. Then fp32 `[C, G]` of each group, and the sums over its channels
    `[G]`, where K has zeros.
    """
    KG: tl.constexpr = groups_of(K)
    C: tl.constexpr = key_width(K)
    m, g, c = tl.arange(0, 2 * G), tl.arange(0, G), tl.arange(0, C)
    unit = tl.zeros([G], tl.float32)
    digits = ()
    numbers = ()
    sums = ()
    if DIGITS is not None:
        at = DIGITS + base * (KG * 2 * G * C) + m[None, :] * C + c[:, None]
        for group in tl.static_range(KG):
            digits += (tl.load(at + group * (2 * G * C)),)
        unit = tl.load(UNITS + base * G + g)
    if of_halves(K):
        place = key_channels(C, KW)
        at = NUMBERS + (base * G + g)[None, :] * K.dim + place[:, None]
        x = tl.load(at, mask=(place < K.dim)[:, None], other=0.0)
        unit = tl.maximum(tl.max(tl.abs(x), 0), 1e-30)
        digits += (in_two(x * (1.0 / unit)[None, :]),)
    elif NUMBERS is not None:
        for group in tl.static_range(KG):
            place = group * C + c
            at = NUMBERS + (base * G + g)[None, :] * K.dim + place[:, None]
            x = tl.load(at, mask=(place < K.dim)[:, None], other=0.0)
            numbers += (x,)
            if K.has("zero"):
                sums += (tl.sum(x, 0),)
    return digits, unit, numbers, sums


@triton.jit
def key_scores(
    queries, codes, scale, zero, FOLD, fold_head, SHIFT, shift_head, TABLE, live, block, last,
    tiles, K: tl.constexpr, NT: tl.constexpr, VBITS: tl.constexpr, INSIDE: tl.constexpr,
    KW: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """Return logits of base 2 `[N, G]`.

    `codes`, `scale`, `zero`: pointers `[NT]` to those of each tile, from `tiles.tiles_at`. `TABLE`,
    `live`, `block`, `last`, `tiles`: K's levels; which tiles are there; the block, the token behind
    the last one, and the tiles of a segment. `K`, `NT`, `INSIDE`, `KW`, `ASM`: as of
    `digits.attend_digits`. `VBITS`: of V, whose order of tokens the scores have.
    """
    digits, unit, numbers, sums = queries
    N: tl.constexpr = NT * 32
    C: tl.constexpr = key_width(K)
    if of_halves(K):
        s = summed(tl.dot(key_halves(codes, live, C, K, KW, ASM), digits[0]))
        s *= (unit * level_worth(K))[None, :]
        if K.has("scale"):
            s *= scales(scale, live, 0, VBITS)[:, None]
    elif K.has("fold"):
        k = key_operand(codes, live, TABLE, 0, K, VBITS, KW, ASM)
        fold = group_numbers(FOLD, fold_head, block, last, tiles, C, NT, K, INSIDE)
        s, scaled = scaled_scores(k, numbers[0], fold, K, NT, VBITS, KW)
    else:
        k = key_operand(codes, live, TABLE, 0, K, VBITS, KW, ASM)
        s = whole(tl.dot(k, digits[0], out_dtype=tl.int32)) * scales(scale, live, 0, VBITS)[:, None]
        for group in tl.static_range(1, groups_of(K)):
            k = key_operand(codes, live, TABLE, group, K, VBITS, KW, ASM)
            part = whole(tl.dot(k, digits[group], out_dtype=tl.int32))
            s += part * scales(scale, live, group, VBITS)[:, None]
        s *= unit[None, :]
        if K.has("zero"):
            for group in tl.static_range(groups_of(K)):
                zeros = zeros_of(zero, scale, live, group, K, VBITS)
                s += zeros[:, None] * sums[group][None, :]
    if K.has("shift"):
        shift = group_numbers(SHIFT, shift_head, block, last, tiles, C, NT, K, INSIDE)
        shifts = numbers[0][None, :, :] * shift[:, :, None]
        if K.middle != 0.0:
            shifts += scaled * K.middle
        s += by_section(tl.sum(shifts, 1)[:, None, :], N, K, VBITS)
    if K.has("fold") and K.has("scale"):
        s *= scales(scale, live, 0, VBITS)[:, None]
    return s
