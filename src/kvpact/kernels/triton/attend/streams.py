"""One stream's tokens in attention: 32 at a time, some channels of them, packed or exact.

Which of both a tile holds is asked for each, so that all threads of a program take the same way.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl

from kvpact.kernels.triton.columns import (
    HELD,
    NEW,
    SINKS_FROM,
    SideColumns,
    count_of_row,
    of_row,
)
from kvpact.kernels.triton.forms import SlotForm
from kvpact.kernels.triton.slots import pointer_to, segment_at, tile_numbers, units_of
from kvpact.kernels.triton.transforms import rotated
from kvpact.kernels.triton.trellis.numbers import base_logits, e5m3, step_numbers, tile_words

TILE = tl.constexpr(32)


@dataclass(frozen=True)
class StreamForm:
    """The constants of K or of V with which kernels are compiled."""

    form: SlotForm | None  # of the slots; None where there are none
    dim: int  # channels
    width: int  # the same padded to a power of two
    number: str  # dtype of exact tokens, one of `NUMBERS`
    aligned: bool  # addresses and steps of all exact tokens are multiples of 16 bytes
    at: SideColumns  # where it stands in the table of rows
    thrice: bool  # products are those of fp32 (three in tf32), not of numbers rounded to tf32
    key_piece: int  # channels of keys that are multiplied at a time, a power of two
    value_piece: int  # and of values


@triton.jit
def rounded(x):
    """Return fp32 numbers rounded to tf32, whose lower bits tensor cores cut off."""
    bits = x.to(tl.int32, bitcast=True)
    return ((bits + 0x1000) & -0x2000).to(tl.float32, bitcast=True)


@triton.jit
def _is_sink(ROWS, row, tokens, S: tl.constexpr):
    first = count_of_row(ROWS, row, SINKS_FROM)
    return (tokens >= first) & (tokens < first + count_of_row(ROWS, row, S.at.sinks))


@triton.jit
def has_packed(ROWS, row, tile, S: tl.constexpr):
    """Return whether a tile has packed tokens."""
    return tile * TILE < count_of_row(ROWS, row, S.at.exact_from)


@triton.jit
def has_exact(ROWS, row, tile, S: tl.constexpr):
    """Return whether a tile has exact tokens."""
    sinks_to = count_of_row(ROWS, row, SINKS_FROM) + count_of_row(ROWS, row, S.at.sinks)
    return (tile * TILE + TILE > count_of_row(ROWS, row, S.at.exact_from)) | (
        tile * TILE < sinks_to
    )


@triton.jit
def exact_tokens(ROWS, row, head, tile, channel, S: tl.constexpr):
    """Return channels of a tile's exact tokens in fp32, `[32, channels]`; zeros for others."""
    TAIL: tl.constexpr = S.at.tail
    SINK: tl.constexpr = S.at.sink
    FRESH: tl.constexpr = S.at.new
    tokens = tile * TILE + tl.arange(0, TILE)
    held, exact_from = count_of_row(ROWS, row, HELD), count_of_row(ROWS, row, S.at.exact_from)
    fresh, tail = tokens >= held, (tokens >= exact_from) & (tokens < held)
    sink = (tokens < exact_from) & _is_sink(ROWS, row, tokens, S)
    at = tl.where(fresh, of_row(ROWS, row, FRESH), of_row(ROWS, row, SINK))
    at = tl.where(tail, of_row(ROWS, row, TAIL), at)
    step = tl.where(fresh, of_row(ROWS, row, FRESH + 1), of_row(ROWS, row, SINK + 1))
    step = tl.where(tail, of_row(ROWS, row, TAIL + 1), step)
    at += step * head
    step = tl.where(fresh, of_row(ROWS, row, FRESH + 2), of_row(ROWS, row, SINK + 2))
    step = tl.where(tail, of_row(ROWS, row, TAIL + 2), step)
    first = tl.where(tail, exact_from, count_of_row(ROWS, row, SINKS_FROM))
    at += step * (tokens - tl.where(fresh, held, first))
    token = at.to(pointer_to(S.number))
    if S.aligned:
        token = tl.multiple_of(token, 16)
    live = (fresh | tail | sink) & (tokens < held + count_of_row(ROWS, row, NEW))
    inside = live[:, None] & (channel < S.dim)[None, :]
    return tl.load(token[:, None] + channel[None, :], mask=inside, other=0.0).to(tl.float32)


@triton.jit
def _segment(ROWS, row, head, tile, S: tl.constexpr):
    """Return where the segment of a tile lies, for `units_of`, and the tile in it."""
    table = of_row(ROWS, row, S.at.slots).to(tl.pointer_type(tl.int64))
    heads = of_row(ROWS, row, S.at.slots + 1).to(tl.pointer_type(tl.int64))
    slot_row, slot_rows = of_row(ROWS, row, S.at.slots + 2), of_row(ROWS, row, S.at.slots + 3)
    segments = of_row(ROWS, row, S.at.slots + 4)
    tiles = count_of_row(ROWS, row, S.at.slots + 5) // TILE
    return segment_at((table, heads, slot_row, head, slot_rows, segments, tiles), tile)


@triton.jit
def _is_packed(ROWS, row, tile, S: tl.constexpr):
    """Return which tokens of a tile are packed, `[32]`."""
    tokens = tile * TILE + tl.arange(0, TILE)
    packed = tokens < count_of_row(ROWS, row, S.at.exact_from)
    return packed & ~_is_sink(ROWS, row, tokens, S)


@triton.jit
def _of_packed(x, ROWS, row, tile, S: tl.constexpr):
    """Return numbers `[32, channels]`, 0 if not packed, in tf32 unless products are fp32's."""
    x = tl.where(_is_packed(ROWS, row, tile, S)[:, None], x, 0.0)
    if not S.thrice:
        x = rounded(x)
    return x


@triton.jit
def packed_tokens(ROWS, row, head, LEVELS, tile, first, COUNT: tl.constexpr, S: tl.constexpr):
    """Return COUNT channels of a tile's packed tokens, `[32, COUNT]`, still transformed."""
    segment, inside = _segment(ROWS, row, head, tile, S)
    x = tile_numbers(segment, LEVELS, inside, first, COUNT, S.form)
    return _of_packed(x, ROWS, row, tile, S)


@triton.jit
def packed_steps(
    ROWS, row, head, LEVELS, tile, channel, there, INDEX: tl.constexpr, S: tl.constexpr
):
    """Return some channels of one block of a tile's packed trellises, `[32, channels]`."""
    FORM: tl.constexpr = S.form
    segment, inside = _segment(ROWS, row, head, tile, S)
    inside = tl.cast(inside, tl.int64)
    n = e5m3(tl.load(units_of("scale", segment, FORM) + inside * 32 + tl.arange(0, 32)))
    words = tile_words(units_of("codes", segment, FORM), inside, FORM)
    x = step_numbers(words, n, LEVELS, channel, there, FORM, INDEX, 1)
    return _of_packed(x, ROWS, row, tile, S)


@triton.jit
def packed_bases(ROWS, row, head, tile, q, first, channel, S: tl.constexpr):
    """Return what the bases of a tile's packed tokens add to logits, `[rows, 32]`."""
    FORM: tl.constexpr = S.form
    segment, inside = _segment(ROWS, row, head, tile, S)
    flags = units_of("base", segment, FORM)
    mean, step = flags, flags
    if FORM.has("mean"):
        mean, step = units_of("mean", segment, FORM), units_of("step", segment, FORM)
    logits = base_logits(flags, mean, step, q, first, inside, channel, FORM)
    return tl.where(_is_packed(ROWS, row, tile, S)[None, :], logits, 0.0)


@triton.jit(do_not_specialize=["q_len", "groups", "heads", "scale"])
def prepare_queries(
    Q, SIGNS, QP, QE, q_row, q_head, q_token, q_len, groups, heads, scale,
    DIM: tl.constexpr, WIDTH: tl.constexpr, STRIDE: tl.constexpr, ROTATED: tl.constexpr,
    BOTH: tl.constexpr, ROUNDED: tl.constexpr, EACH: tl.constexpr,
):  # fmt: skip
    """Prepare EACH rows. Grid: (row tiles, heads, B).

    Q: `[B, heads * groups, q_len, DIM or more]` with strides. QP, QE: see `attend_general`; STRIDE:
    from one of their rows to the next. SIGNS: of the transform, if ROTATED. BOTH: whether QP is
    written, too. ROUNDED: whether to tf32.
    """
    head, row = tl.program_id(1), tl.program_id(2).to(tl.int64)
    count = groups * q_len
    at_row, channel = tl.program_id(0) * EACH + tl.arange(0, EACH), tl.arange(0, WIDTH)
    inside = (at_row < count)[:, None] & (channel < DIM)[None, :]
    at = row * q_row + (head * groups + at_row // q_len).to(tl.int64) * q_head
    at += (at_row % q_len).to(tl.int64) * q_token
    x = tl.load(Q + at[:, None] + channel[None, :], mask=inside, other=0.0).to(tl.float32) * scale
    at = ((row * heads + head) * count + at_row)[:, None] * STRIDE + channel[None, :]
    tl.store(QE + at, rounded(x) if ROUNDED else x, inside)
    if ROTATED:
        x = rotated(x, SIGNS, EACH, WIDTH, DIM)
    if BOTH:
        tl.store(QP + at, rounded(x) if ROUNDED else x, inside)
