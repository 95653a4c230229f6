"""Kernels that decode packed tokens to dense numbers; those of treated keys undo more."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from kvpact.formats import TILE
from kvpact.kernels.base import SlotReader, check_out
from kvpact.kernels.triton.forms import places_of, slots_of
from kvpact.kernels.triton.slots import segment_at, tile_numbers, units_of
from kvpact.kernels.triton.transforms import rotated_back, saturated
from kvpact.kernels.triton.trellis.numbers import (
    FIRST,
    MEAN,
    base_flags,
    e5m3,
    step_numbers,
    tile_words,
)
from kvpact.kernels.triton.trellis.queries import key_tables
from kvpact.methods.trellis_learning import TreatedKeys


def decode_triton(slots: SlotReader, start: int, end: int, out: Tensor, inverse: bool) -> None:
    """Decode packed tokens; parameters as of `Backend.decode`."""
    codec, known = slots.codec, slots_of(slots.codec, out.device)
    form = known.form
    assert form is not None, known.reason
    check_out(out, start, end, form.dim)
    batch, heads = out.shape[:2]
    places = places_of(slots.source, form, batch, out.device)
    if not out.numel():
        return
    tiles = -(-end // TILE) - start // TILE
    where = (places.table, places.heads, known.levels)
    rest = (out, *out.stride()[:3], start, end, batch, places.segments, places.tiles)
    # As many warps as hold a tile without spilling registers.
    options: dict[str, Any] = {"num_warps": min(form.padded // 16, 8), "enable_fp_fusion": False}
    if isinstance(codec, TreatedKeys):
        blocks, device = len(codec.trellis.blocks), out.device
        tables = key_tables(codec, heads, device)
        decode_keys[tiles * blocks, heads, batch](*where, *tables[:5], *rest, FORM=form, **options)
        return
    inverse = inverse and form.rotates
    decode_tiles[tiles, heads, batch](
        *where, known.signs, *rest, FORM=form, INVERSE=inverse, **options
    )


@triton.jit(do_not_specialize=["start", "end", "batch", "segments", "tiles_per_segment"])
def decode_tiles(
    TABLE, HEADS, LEVELS, SIGNS, OUT, out_row, out_head, out_token, start, end, batch, segments,
    tiles_per_segment, FORM: tl.constexpr, INVERSE: tl.constexpr,
):  # fmt: skip
    """Decode a tile of 32 tokens of one row and head.

    `TABLE`, `HEADS`, `batch`, `segments`, `tiles_per_segment`: as of `segment_at`; `LEVELS`,
    `FORM`: as of `tile_numbers`. `SIGNS`: as of `rotated_back`. `OUT`: to token `start` of the
    first row and head: fp32, fp16 or bf16. `out_row`, `out_head`, `out_token`: strides of `OUT`, in
    numbers.
    """
    tile, head, row = start // 32 + tl.program_id(0), tl.program_id(1), tl.program_id(2)
    slots = (TABLE, HEADS, row, head, batch, segments, tiles_per_segment)
    segment, inside = segment_at(slots, tile)
    x = tile_numbers(segment, LEVELS, inside, 0, FORM.padded, FORM)
    if INVERSE:
        x = rotated_back(x, SIGNS, 32, FORM.padded, FORM.dim)
    token, d = tile * 32 + tl.arange(0, 32), tl.arange(0, FORM.padded)
    place = tl.cast(row, tl.int64) * out_row + tl.cast(head, tl.int64) * out_head
    tokens = (token - start).to(tl.int64) * out_token
    live = (token >= start) & (token < end)
    tl.store(
        OUT + place + tokens[:, None] + d[None, :],
        saturated(x, OUT.dtype.element_ty),
        mask=live[:, None] & (d < FORM.dim)[None, :],
    )


@triton.constexpr_function
def block_begin(form, index):
    """Return the first channel of a block."""
    return sum(block.dim for block in form.blocks[:index])


@triton.constexpr_function
def block_signs(form, index):
    """Return the place of a block's signs among those of all blocks (`KeyTables.signs`)."""
    return sum(block.dim + (1 << (block.dim.bit_length() - 1)) for block in form.blocks[:index])


@triton.constexpr_function
def block_width(form, index):
    """Return the channels of a block, padded to a power of two."""
    return max(1 << (form.blocks[index].dim - 1).bit_length(), 16)


@triton.constexpr_function
def steps_before(form, index):
    """Return how many blocks before one have bits: its place among `SlotForm.steps`."""
    return sum(block.bits > 0 for block in form.blocks[:index])


@triton.jit
def _rotated_back(words, n, LEVELS, SIGNS, deviation, FORM: tl.constexpr, INDEX: tl.constexpr):
    """Return the numbers of a block of a tile, times its deviation, rotated back."""
    WIDTH: tl.constexpr = block_width(FORM.trellis, INDEX)
    DIM: tl.constexpr = FORM.trellis.blocks[INDEX].dim
    BEGIN: tl.constexpr = block_begin(FORM.trellis, INDEX)
    place = tl.arange(0, WIDTH)
    if FORM.trellis.blocks[INDEX].bits > 0:
        STEPS: tl.constexpr = steps_before(FORM.trellis, INDEX)
        y = step_numbers(words, n, LEVELS, BEGIN + place, place < DIM, FORM, STEPS, 1)
    else:
        y = tl.zeros((32, WIDTH), tl.float32) * n[:, None]
    return rotated_back(y * deviation, SIGNS, 32, WIDTH, DIM)


@triton.jit(do_not_specialize=["start", "end", "batch", "segments", "tiles_per_segment"])
def decode_keys(
    TABLE, HEADS, LEVELS, SIGNS, ORDER, WEIGHT, FIRST_KEY, DEVIATION, OUT, out_row, out_head,
    out_token, start, end, batch, segments, tiles_per_segment, FORM: tl.constexpr,
):  # fmt: skip
    """Decode a block of channels of a tile of 32 tokens of one row and head.

    The grid has a program for every block of every tile, head and row.

    `SIGNS`, `ORDER`, `WEIGHT`, `FIRST_KEY`, `DEVIATION`: as in `KeyTables`; all else: as of
    `decode_tiles`.
    """
    BLOCKS: tl.constexpr = len(FORM.trellis.blocks)
    block, head, row = tl.program_id(0) % BLOCKS, tl.program_id(1), tl.program_id(2)
    tile = start // 32 + tl.program_id(0) // BLOCKS
    slots = (TABLE, HEADS, row, head, batch, segments, tiles_per_segment)
    segment, inside = segment_at(slots, tile)
    codes, scale = units_of("codes", segment, FORM), units_of("scale", segment, FORM)
    n = e5m3(tl.load(scale + inside * 32 + tl.arange(0, 32)))
    words = tile_words(codes, inside, FORM)
    token = tile * 32 + tl.arange(0, 32)
    live = (token >= start) & (token < end)
    out = OUT + tl.cast(row, tl.int64) * out_row + tl.cast(head, tl.int64) * out_head
    out += ((token - start).to(tl.int64) * out_token)[:, None]
    if FORM.has("base"):
        flag = base_flags(units_of("base", segment, FORM), inside)[:, None]
    if FORM.has("mean"):
        means, steps = units_of("mean", segment, FORM), units_of("step", segment, FORM)
        group = inside * 32 // FORM.trellis.center
        step = tl.load(steps + group).to(tl.float32)
    for i in tl.static_range(BLOCKS):
        if block == i:
            place = tl.arange(0, block_width(FORM.trellis, i))
            there = place < FORM.trellis.blocks[i].dim
            deviation = tl.load(DEVIATION + head * BLOCKS + i)
            signs = SIGNS + block_signs(FORM.trellis, i)
            y = _rotated_back(words, n, LEVELS, signs, deviation, FORM, i)
            sorted_at = head * FORM.dim + block_begin(FORM.trellis, i) + place
            channel = tl.load(ORDER + sorted_at, mask=there, other=0)
            weight = tl.load(WEIGHT + head * FORM.dim + channel)
            y = tl.div_rn(y, tl.broadcast_to(weight[None, :], y.shape))
            if FORM.has("mean"):
                mean = tl.load(means + group * FORM.dim + channel).to(tl.float32) * step
                y = tl.where(flag == MEAN, y + mean[None, :], y)
            if FORM.has("base"):
                first = tl.load(FIRST_KEY + head * FORM.dim + channel)
                y = tl.where(flag == FIRST, y + first[None, :], y)
            y = saturated(y, OUT.dtype.element_ty)
            tl.store(out + channel[None, :], y, mask=live[:, None] & there[None, :])
