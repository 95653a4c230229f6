"""Numbers per channel and group of tokens: scales and shifts of K, scales of V.

K's scales go into the queries, which get digits anew for each group; its shifts are one product per
query and group, which is added to the scores. A block has one section for each group of tokens, or
is one where it lies within a group.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

from kvpact.kernels.triton.operands import level_worth
from kvpact.kernels.triton.tiles import positions, tiles_at, tiles_together
from kvpact.kernels.triton.two_digits import MOST, split_digits, whole

if TYPE_CHECKING:
    from kvpact.kernels.triton.forms import SlotForm


@triton.constexpr_function
def sections_of(form: SlotForm, tiles: int) -> int:
    """Return the groups of tokens of a block of so many tiles; 1 where it lies within one."""
    return max(1, tiles * 32 // form.group) if form.group else 1


@triton.constexpr_function
def _mixed(form: SlotForm, tiles: int, vbits: int) -> bool:
    """Return whether eight rows of a product have tokens of more than one section."""
    return sections_of(form, tiles) > 1 and tiles_together(vbits) > 1


@triton.jit
def group_numbers(
    SEGMENTS, head_bytes, block, last, tiles, C: tl.constexpr, NT: tl.constexpr,
    FORM: tl.constexpr, INSIDE: tl.constexpr,
):  # fmt: skip
    """Load a number per channel of each section of a block, fp32 `[T, C]`.

    `SEGMENTS`, `head_bytes`: of the field, from `tiles.segments_of`. `block`, `last`, `tiles`: the
    block, the token behind the last one, and the tiles of a segment. `C`, `NT`, `FORM`, `INSIDE`:
    channels, those of the slots filled up; the others as of `attend_digits`.
    """
    T: tl.constexpr = sections_of(FORM, NT)
    tile = block * NT + tl.arange(0, T) * (NT // T)
    live = tile * 32 < last
    if INSIDE:
        segment = block * NT // tiles
    else:
        segment = tl.where(live, tile // tiles, 0)
    group = (tile - segment * tiles) * 32 // FORM.group
    at = tiles_at(SEGMENTS, head_bytes, segment, group, FORM.dim, tl.float16)[:, None]
    at = tl.multiple_of(at, [16, 16])
    c = tl.arange(0, C)[None, :]
    seen = live[:, None]
    if FORM.dim < C:
        seen = seen & (c < FORM.dim)
    return tl.load(at + c, mask=seen, other=0.0).to(tl.float32)


@triton.jit
def in_key_order(x, FORM: tl.constexpr, KW: tl.constexpr):
    """Put channels of digits `[T, C, M]` in the order of `key_operand` (`channel_places`)."""
    T: tl.constexpr = x.shape[0]
    C: tl.constexpr = x.shape[1]
    M: tl.constexpr = x.shape[2]
    if FORM.bits == 8:
        if KW == 8:
            x = x.reshape(T, C // 32, 2, 4, 4, M).permute(0, 1, 3, 2, 4, 5)
    elif FORM.bits == 4:
        x = x.reshape(T, C // 32, 4, 2, 2, 2, M)
        x = x.permute(0, 1, 5, 2, 3, 4, 6) if KW == 4 else x.permute(0, 1, 2, 5, 3, 4, 6)
    elif FORM.bits == 2:
        x = x.reshape(T, C // 64, 4, 2, 2, 2, 2, M)
        x = x.permute(0, 1, 3, 6, 2, 4, 5, 7) if KW == 4 else x.permute(0, 1, 3, 2, 6, 4, 5, 7)
    else:
        x = x.reshape(T, C // 128, 4, 2, 2, 2, 2, 2, M)
        if KW == 4:
            x = x.permute(0, 1, 6, 7, 4, 2, 3, 5, 8)
        else:
            x = x.permute(0, 1, 6, 7, 2, 4, 3, 5, 8)
    return x.reshape(T, C, M)


@triton.jit
def scaled_digits(q, fold, FORM: tl.constexpr, KW: tl.constexpr):
    """Return digits of queries `[C, G]` times numbers `[T, C]`.

    Returns int8 `[T, C, 2 G]`, two digits of base 256, channels in the order of `key_operand`; what
    they are worth, `[T, G]`; the products themselves, `[T, C, G]`.
    """
    T: tl.constexpr = fold.shape[0]
    C: tl.constexpr = fold.shape[1]
    M: tl.constexpr = q.shape[1] * 2
    x = q[None, :, :] * fold[:, :, None]
    unit = tl.maximum(tl.max(tl.abs(x), 1), 1e-30) * (1.0 / MOST)
    pair = split_digits(x * (1.0 / unit)[:, None, :])
    return in_key_order(pair.reshape(T, C, M), FORM, KW), unit, x


@triton.jit
def by_section(x, N: tl.constexpr, FORM: tl.constexpr, VBITS: tl.constexpr):
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
def scaled_scores(
    k, q, fold, FORM: tl.constexpr, NT: tl.constexpr, VBITS: tl.constexpr, KW: tl.constexpr
):
    """Return the products of K `[N, C]` and queries `[C, G]` times numbers `[T, C]`: `[N, G]`.

    And what the queries were split to: `[T, C, G]`.
    """
    T: tl.constexpr = fold.shape[0]
    C: tl.constexpr = fold.shape[1]
    N: tl.constexpr = k.shape[0]
    M: tl.constexpr = q.shape[1] * 2
    digits, unit, scaled = scaled_digits(q, fold, FORM, KW)
    unit = (unit * level_worth(FORM))[:, None, :]
    if _mixed(FORM, NT, VBITS):
        # Of all sections, for every token.
        columns = digits.permute(1, 0, 2).reshape(C, T * M)
        s = whole(tl.dot(k, columns, out_dtype=tl.int32), 256)
        s = by_section(s.reshape(N, T, M // 2).permute(1, 0, 2) * unit, N, FORM, VBITS)
    else:
        if T == 1:
            sums = tl.dot(k, digits.reshape(C, M), out_dtype=tl.int32)
        else:
            sums = tl.dot(k.reshape(T, N // T, C), digits, out_dtype=tl.int32).reshape(N, M)
        s = (whole(sums, 256).reshape(T, N // T, M // 2) * unit).reshape(N, M // 2)
    return s, scaled


@triton.jit
def columns_of_sections(x, FORM: tl.constexpr, VBITS: tl.constexpr):
    """Return weights `[N, G]` once for each section, `[N, T G]`: those of other tokens are 0."""
    N: tl.constexpr = x.shape[0]
    G: tl.constexpr = x.shape[1]
    T: tl.constexpr = sections_of(FORM, N // 32)
    if T == 1:
        return x
    else:
        section = positions(0, N // 32, VBITS) // FORM.group
        own = section[:, None] == tl.arange(0, T)[None, :]
        return tl.where(own[:, :, None], x[:, None, :], 0.0).reshape(N, T * G)


@triton.jit
def columns_alike(x, FORM: tl.constexpr, NT: tl.constexpr):
    """Return numbers `[G]` once for each section, `[T G]`."""
    T: tl.constexpr = sections_of(FORM, NT)
    G: tl.constexpr = x.shape[0]
    return tl.broadcast_to(x[None, :], (T, G)).reshape(T * G)


@triton.jit
def sections_summed(x, fold):
    """Return the sums `[D, G]` of what sections have, `[D, T G]`, times their numbers `[T, D]`.

    Channels of `x` are in the order of `value_operand`'s rows.
    """
    T: tl.constexpr = fold.shape[0]
    D: tl.constexpr = fold.shape[1]
    rows = fold.reshape(T, D // 32, 8, 4).permute(1, 3, 2, 0).reshape(D, T)
    return tl.sum(x.reshape(D, T, x.shape[1] // T) * rows[:, :, None], 1)
