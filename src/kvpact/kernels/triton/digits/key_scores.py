"""Scores of a block: products of K's levels and digits of queries, scaled and shifted."""

from __future__ import annotations

import triton
import triton.language as tl

from kvpact.kernels.triton.columns import K_SLOTS
from kvpact.kernels.triton.digits.operands import groups_of, key_operand, key_width
from kvpact.kernels.triton.digits.tiles import load_per_token, segments_of
from kvpact.kernels.triton.digits.token_groups import by_section, group_numbers
from kvpact.kernels.triton.digits.two_digits import whole


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
def load_queries(DIGITS, UNITS, NUMBERS, base, K: tl.constexpr, G: tl.constexpr):
    """Load the queries of a KV head, number `base`.

    Returns int8 `[key_width, 2 G]` of each group of channels, and what they are worth, `[G]`. Then
    fp32 `[C, G]` of each group, and the sums over its channels `[G]`, where K has zeros.
    """
    KG: tl.constexpr = groups_of(K)
    C: tl.constexpr = key_width(K)
    m, g, c = tl.arange(0, 2 * G), tl.arange(0, G), tl.arange(0, C)
    digits = ()
    numbers = ()
    sums = ()
    at = DIGITS + base * (KG * 2 * G * C) + m[None, :] * C + c[:, None]
    for group in tl.static_range(KG):
        digits += (tl.load(at + group * (2 * G * C)),)
    unit = tl.load(UNITS + base * G + g)
    if NUMBERS is not None:
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
    queries, fields, where, live, block, last, tiles, TABLE, K: tl.constexpr, NT: tl.constexpr,
    ORDER: tl.constexpr, INSIDE: tl.constexpr, KW: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """Return logits of base 2 `[N, G]`.

    `fields`, `where`: of `tiles.fields_of`. `live`, `block`, `last`, `tiles`: which tiles are
    there; the block, the token behind the last one, and the tiles of a segment. `TABLE`: K's
    levels. `ORDER`: the order of tokens, which V's bits tell. `K`, `NT`, `INSIDE`, `KW`, `ASM`: as
    of `digits.attend_digits`.
    """
    digits, unit, numbers, sums = queries
    codes, scale, zero = fields
    k = key_operand(codes, live, TABLE, 0, K, ORDER, KW, ASM)
    s = whole(tl.dot(k, digits[0], out_dtype=tl.int32)) * scales(scale, live, 0, ORDER)[:, None]
    for group in tl.static_range(1, groups_of(K)):
        k = key_operand(codes, live, TABLE, group, K, ORDER, KW, ASM)
        part = whole(tl.dot(k, digits[group], out_dtype=tl.int32))
        s += part * scales(scale, live, group, ORDER)[:, None]
    s *= unit[None, :]
    if K.has("zero"):
        for group in tl.static_range(groups_of(K)):
            zeros = zeros_of(zero, scale, live, group, K, ORDER)
            s += zeros[:, None] * sums[group][None, :]
    if K.has("shift"):
        at, head = segments_of(where[0], where[1], where[2], K_SLOTS, K.index_of("shift"))
        shift = group_numbers(at, head, block, last, tiles, key_width(K), NT, K, INSIDE)
        shifts = numbers[0][None, :, :] * shift[:, :, None]
        s += by_section(tl.sum(shifts, 1)[:, None, :], NT * 32, K, ORDER)
    return s
