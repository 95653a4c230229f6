"""What a group of tokens shares, channel by channel: means of rotated tokens, and grids."""

from __future__ import annotations

import triton
import triton.language as tl

from kvpact.kernels.triton.encode.codes import grid_between
from kvpact.kernels.triton.encode.kernel import as_fp32, load_tokens
from kvpact.kernels.triton.slots import segment_at, units_of
from kvpact.kernels.triton.transforms import rotated, tree_sum

CHANNELS = 32
"""Channels that a program works on."""
_CHANNELS = tl.constexpr(CHANNELS)


@triton.jit(do_not_specialize=["tokens"])
def rotate_tokens(
    X, x_row, x_head, x_token, SIGNS, Y, tokens, ROWS: tl.constexpr, FORM: tl.constexpr
):
    """Rotate `ROWS` tokens of one row and head into `Y` `[rows, heads, tokens, dim]`, fp32."""
    block, head, row = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    token, d = block * ROWS + tl.arange(0, ROWS), tl.arange(0, FORM.padded)
    live = token < tokens
    x = load_tokens((X, x_row, x_head, x_token), row, head, token, live, FORM)
    y = rotated(x, SIGNS, ROWS, FORM.padded, FORM.dim)
    pair = tl.cast(row, tl.int64) * tl.num_programs(1) + head
    place = (pair * tokens + token) * FORM.dim
    tl.store(Y + place[:, None] + d[None, :], y, mask=live[:, None] & (d < FORM.dim)[None, :])


@triton.jit
def _store(NAME: tl.constexpr, numbers, channel, segment, tile, FORM: tl.constexpr):
    """Store a number per channel, fp16, of the group that begins with a tile."""
    unit = tile * 32 // FORM.group
    place = units_of(NAME, segment, FORM) + unit * FORM.dim + channel
    tl.store(place, numbers, mask=channel < FORM.dim)


@triton.jit(do_not_specialize=["start", "tiles_per_segment", "batch", "segments"])
def encode_groups(
    X, x_row, x_head, x_token, TABLE, HEADS, start, tiles_per_segment, batch, segments,
    FORM: tl.constexpr,
):  # fmt: skip
    """Store what a group of tokens of one row and head has per channel: a mean, or a grid.

    The grid has a program for every group and `CHANNELS` channels, head and row. Parameters as of
    `encode_tokens`.
    """
    CHUNKS: tl.constexpr = (FORM.dim + _CHANNELS - 1) // _CHANNELS
    group, head, row = tl.program_id(0) // CHUNKS, tl.program_id(1), tl.program_id(2)
    channel = tl.program_id(0) % CHUNKS * _CHANNELS + tl.arange(0, _CHANNELS)
    token = group * FORM.group + tl.arange(0, FORM.group)
    first = tl.cast(row, tl.int64) * x_row + tl.cast(head, tl.int64) * x_head
    place = first + token.to(tl.int64)[None, :] * x_token + channel[:, None]
    inside = tl.broadcast_to((channel < FORM.dim)[:, None], (_CHANNELS, FORM.group))
    x = as_fp32(tl.load(X + place, mask=inside, other=0.0))
    slots = (TABLE, HEADS, row, head, batch, segments, tiles_per_segment)
    segment, tile = segment_at(slots, (start + group * FORM.group) // 32)
    if FORM.kind == "channel":
        scale, zero = grid_between(tl.min(x, 1), tl.max(x, 1), FORM.bits)
        _store("scale", scale, channel, segment, tile, FORM)
        _store("zero", zero, channel, segment, tile, FORM)
    else:
        # A power of two divides without rounding, but for what is below the normal numbers.
        count = tl.full((_CHANNELS,), FORM.group, tl.float32)
        mean = tl.div_rn(tree_sum(x, _CHANNELS, FORM.group, FORM.group), count).to(tl.float16)
        _store("mean", mean, channel, segment, tile, FORM)
