"""Scores of a block: products of K's levels and digits of queries, scaled and shifted.

Shifts are numbers per channel and group of tokens: one product per query and group. A block has one
section for each group of tokens, or is one where it lies within a group.
"""

import triton
import triton.language as tl

from kvpact.kernels.triton.columns import K_SLOTS
from kvpact.kernels.triton.digits.levels import whole
from kvpact.kernels.triton.digits.operands import key_operand, key_width
from kvpact.kernels.triton.digits.tiles import (
    load_per_token,
    positions,
    segments_of,
    tiles_at,
    tiles_together,
)
from kvpact.kernels.triton.forms import SlotForm


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
    KG: tl.constexpr = K.groups
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


@triton.constexpr_function
def _sections_of(form: SlotForm, tiles: int) -> int:
    """Return the groups of tokens of a block of so many tiles; 1 where it lies within one."""
    return max(1, tiles * 32 // form.group) if form.has("shift") else 1


@triton.constexpr_function
def _mixed(form: SlotForm, tiles: int, vbits: int) -> bool:
    """Return whether eight rows of a product have tokens of more than one section."""
    return _sections_of(form, tiles) > 1 and tiles_together(vbits) > 1


@triton.jit
def _group_numbers(
    SEGMENTS, head_bytes, block, last, tiles, C: tl.constexpr, NT: tl.constexpr,
    FORM: tl.constexpr, INSIDE: tl.constexpr,
):  # fmt: skip
    """Load a number per channel of each section of a block, fp32 `[T, C]`.

    `SEGMENTS`, `head_bytes`: from `tiles.segments_of`. `last`: the token after the last one.
    `tiles`: those of a segment. `C`: channels, filled up. All else: as of `attend_digits`.
    """
    T: tl.constexpr = _sections_of(FORM, NT)
    tile = block * NT + tl.arange(0, T) * (NT // T)
    live = tile * 32 < last
    if INSIDE:
        segment = block * NT // tiles
    else:
        segment = tl.where(live, tile // tiles, 0)
    group = (tile - segment * tiles) * 32 // FORM.group
    at = tiles_at(SEGMENTS, head_bytes, segment, group, FORM.dim, "fp16")[:, None]
    at = tl.multiple_of(at, [16, 16])
    c = tl.arange(0, C)[None, :]
    seen = live[:, None]
    if FORM.dim < C:
        seen = seen & (c < FORM.dim)
    return tl.load(at + c, mask=seen, other=0.0).to(tl.float32)


@triton.jit
def _by_section(x, N: tl.constexpr, FORM: tl.constexpr, VBITS: tl.constexpr):
    """Return for each token what its section has: `[T, 1 or N, G]` to `[N, G]`."""
    T: tl.constexpr = x.shape[0]
    G: tl.constexpr = x.shape[2]
    if _mixed(FORM, N // 32, VBITS):
        section = positions(0, N // 32, VBITS) // FORM.group
        own = section[None, :] == tl.arange(0, T)[:, None]
        return tl.sum(tl.where(own[:, :, None], x, 0.0), 0)
    else:
        return tl.broadcast_to(x, (T, N // T, G)).reshape(N, G)


@triton.jit
def key_scores(
    queries, fields, where, live, block, last, tiles, TABLE, K: tl.constexpr, NT: tl.constexpr,
    ORDER: tl.constexpr, INSIDE: tl.constexpr, KW: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """Return logits of base 2 `[N, G]`.

    `fields`, `where`: of `tiles.fields_of`. `live`: which tiles are there; `last`: the token after
    the last one; `tiles`: those of a segment. `TABLE`: K's levels. `ORDER`: the order of tokens,
    by V's bits. All else: as of `digits.attend_digits`.
    """
    digits, unit, numbers, sums = queries
    codes, scale, zero = fields
    KG: tl.constexpr = K.groups
    k = key_operand(codes, live, TABLE, 0, K, ORDER, KW, ASM)
    s = whole(tl.dot(k, digits[0], out_dtype=tl.int32)) * scales(scale, live, 0, ORDER)[:, None]
    for group in tl.static_range(1, KG):
        k = key_operand(codes, live, TABLE, group, K, ORDER, KW, ASM)
        part = whole(tl.dot(k, digits[group], out_dtype=tl.int32))
        s += part * scales(scale, live, group, ORDER)[:, None]
    s *= unit[None, :]
    if K.has("zero"):
        for group in tl.static_range(KG):
            zeros = zeros_of(zero, scale, live, group, K, ORDER)
            s += zeros[:, None] * sums[group][None, :]
    if K.has("shift"):
        at, head = segments_of(where[0], where[1], where[2], K_SLOTS, K.index_of("shift"))
        shift = _group_numbers(at, head, block, last, tiles, key_width(K), NT, K, INSIDE)
        shifts = numbers[0][None, :, :] * shift[:, :, None]
        s += _by_section(tl.sum(shifts, 1)[:, None, :], NT * 32, K, ORDER)
    return s
