"""Tokens to numbers of trellises, and codes to slots: all of encoding but `viterbi`.

Bytes are those of `TrellisCodec.encode` and `TreatedKeys.encode`: launch with
``enable_fp_fusion=False``. A program has the tokens of one tile of 32, of one row and head; what it
leaves to the next kernel lies in memory of its own, `[channels, 32]`.
"""

import triton
import triton.language as tl

from kvpact.kernels.triton.decode.kernel import block_begin, block_signs, block_width
from kvpact.kernels.triton.encode.kernel import as_fp32
from kvpact.kernels.triton.encode.viterbi import viterbi
from kvpact.kernels.triton.slots import segment_at, units_of
from kvpact.kernels.triton.transforms import rotated, tree_sum
from kvpact.kernels.triton.trellis.numbers import (
    FIRST,
    MEAN,
    base_flags,
    chosen_bases,
    distance,
    e5m3,
)


@triton.jit
def first_position(HELD, held_row, start, row, BEHIND: tl.constexpr):
    """Return the position of a row's first token: `start`, or what the device says."""
    position = start
    if BEHIND:
        position = tl.load(HELD + row * held_row).to(tl.int32)
    return position


@triton.jit
def tile_tokens(start, tokens):
    """Return the tile of a program, its tokens counted from the first one, and which are there."""
    tile = start // 32 + tl.program_id(0)
    token = tile * 32 + tl.arange(0, 32) - start
    return tile, token, (token >= 0) & (token < tokens)


@triton.jit
def own_memory(SIZE: tl.constexpr, heads):
    """Return where a program's part of a `[B, heads, tiles, SIZE]` memory begins."""
    row, head = tl.program_id(2).to(tl.int64), tl.program_id(1) % heads
    return ((row * heads + head) * tl.num_programs(0) + tl.program_id(0)) * SIZE


@triton.jit
def _treated(x, base, channel, head, WEIGHT, FORM: tl.constexpr):
    """Return tokens less their bases, times the weights."""
    weight = tl.load(WEIGHT + head * FORM.dim + channel)
    return (x - base) * weight[None, :]


@triton.jit
def store_flags(units, tile, flag, live):
    """Add the bases of a tile's tokens to their words."""
    flag = tl.where(live, flag, 0) << (tl.arange(0, 32) % 16 * 2)
    words, place = tl.sum(flag.reshape(2, 16), 1), tile * 2 + tl.arange(0, 2)
    tl.store(units + place, tl.load(units + place) | words)


@triton.jit(do_not_specialize=["start", "tokens", "tiles_per_segment", "batch", "segments"])
def treat_tokens(
    X, x_row, x_head, x_token, TABLE, HEADS, HELD, held_row,
    SIGNS, ORDER, WEIGHT, FIRST_KEY, DEVIATION, NUMBERS,
    start, tokens, tiles_per_segment, batch, segments, FORM: tl.constexpr, BEHIND: tl.constexpr,
):  # fmt: skip
    """Rotate the tokens of a tile into `NUMBERS`; store their scales, and their bases if no means.

    A program for every tile, head and row. `HELD`, `held_row`: int64, how many tokens stand before
    these, for each row, and the step to the next one's, instead of `start`; used if `BEHIND`.
    `SIGNS`, `ORDER`, `WEIGHT`, `FIRST_KEY`, `DEVIATION`: as in `KeyTables`. `NUMBERS`:
    `[B, heads, tiles, channels, 32]` fp32. All else: as of `encode_tokens`.
    """
    head, row = tl.program_id(1), tl.program_id(2)
    position = first_position(HELD, held_row, start, row, BEHIND)
    tile, token, live = tile_tokens(position, tokens)
    slots = (TABLE, HEADS, row, head, batch, segments, tiles_per_segment)
    segment, tile = segment_at(slots, tile)
    X += tl.cast(row, tl.int64) * x_row + tl.cast(head, tl.int64) * x_head
    X += (token.to(tl.int64) * x_token)[:, None]
    numbers = NUMBERS + own_memory(FORM.dim * 32, tl.num_programs(1))
    lane, d = tl.arange(0, 32), tl.arange(0, FORM.padded)
    if FORM.has("base"):
        units = units_of("base", segment, FORM)
        if FORM.trellis.center == 0:
            inside = (d < FORM.dim)[None, :] & live[:, None]
            x = as_fp32(tl.load(X + d[None, :], mask=inside, other=0.0))
            weight = tl.load(WEIGHT + head * FORM.dim + d, mask=d < FORM.dim, other=0.0)
            first = tl.load(FIRST_KEY + head * FORM.dim + d, mask=d < FORM.dim, other=0.0)
            far = distance(x, weight, FORM)
            flag = chosen_bases(far, distance(x - first[None, :], weight, FORM), far)
            store_flags(units, tile, flag, live)
        else:
            flag = base_flags(units, tile)
            means, steps = units_of("mean", segment, FORM), units_of("step", segment, FORM)
            group = tile * 32 // FORM.trellis.center
            step = tl.load(steps + group).to(tl.float32)
    for i in tl.static_range(len(FORM.trellis.blocks)):
        place = tl.arange(0, block_width(FORM.trellis, i))
        there = place < FORM.trellis.blocks[i].dim
        begin = block_begin(FORM.trellis, i)
        channel = begin + place
        if FORM.treated:
            channel = tl.load(ORDER + head * FORM.dim + channel, mask=there, other=0)
        inside = live[:, None] & there[None, :]
        y = as_fp32(tl.load(X + channel[None, :], mask=inside, other=0.0))
        if FORM.treated:
            base = y * 0.0
            if FORM.has("base"):
                first = tl.load(FIRST_KEY + head * FORM.dim + channel)
                base = tl.where((flag == FIRST)[:, None], first[None, :], 0.0)
                if FORM.trellis.center > 0:
                    mean = tl.load(means + group * FORM.dim + channel).to(tl.float32) * step
                    base = tl.where((flag == MEAN)[:, None], mean[None, :], base)
            y = tl.where(inside, _treated(y, base, channel, head, WEIGHT, FORM), 0.0)
        signs = SIGNS + block_signs(FORM.trellis, i)
        y = rotated(y, signs, 32, block_width(FORM.trellis, i), FORM.trellis.blocks[i].dim)
        if FORM.treated:
            deviation = tl.load(DEVIATION + head * len(FORM.trellis.blocks) + i)
            y = y * tl.div_rn(1.0, deviation)
        at = ((begin + place) * 32)[None, :] + lane[:, None]
        tl.store(numbers + at, y, mask=tl.broadcast_to(there[None, :], at.shape))
    if len(FORM.trellis.blocks) > 1:
        tl.debug_barrier()  # what one thread stored others load
        at = (d * 32)[None, :] + lane[:, None]
        inside = tl.broadcast_to((d < FORM.dim)[None, :], at.shape)
        y = tl.load(numbers + at, mask=inside, other=0.0)
    energy = tree_sum(y * y, 32, FORM.padded, FORM.dim)
    size = tl.sqrt_rn(tl.div_rn(energy, tl.full([32], FORM.dim, tl.float32)))
    bits = size.to(tl.int32, bitcast=True)
    byte = ((bits + 0x7FFFF + (bits >> 20 & 1)) >> 20) - 888
    byte = tl.minimum(tl.maximum(byte, 0), 255)
    scale = units_of("scale", segment, FORM)
    tl.store(scale + tile * 32 + lane, byte.to(tl.uint8), mask=live)


@triton.constexpr_function
def _unit(form, index):
    return form.steps[index].unit


@triton.jit(do_not_specialize=["start", "tokens", "tiles_per_segment", "batch", "segments"])
def search_codes(
    TABLE, HEADS, HELD, held_row, NUMBERS, BACK, CODES, CELLS,
    start, tokens, heads, tiles_per_segment, batch, segments,
    FORM: tl.constexpr, BEHIND: tl.constexpr,
):  # fmt: skip
    """Find the codes of one block of a tile's tokens: a program for each tile, head and block, row.

    `NUMBERS`, `BACK`, `CODES`: `[B, heads, tiles, channels, 32]`: fp32 of `treat_tokens`; int16;
    uint8. `CELLS`: as in `KeyTables`. All else: as of `treat_tokens`.
    """
    head, row = tl.program_id(1) % heads, tl.program_id(2)
    position = first_position(HELD, held_row, start, row, BEHIND)
    tile, _, live = tile_tokens(position, tokens)
    slots = (TABLE, HEADS, row, head, batch, segments, tiles_per_segment)
    segment, tile = segment_at(slots, tile)
    scale = units_of("scale", segment, FORM)
    n = e5m3(tl.load(scale + tile * 32 + tl.arange(0, 32)))
    empty = (n == 0.0) | ~live
    safe = tl.where(n == 0.0, 1.0, n)
    own = own_memory(FORM.dim * 32, heads)
    for i in tl.static_range(len(FORM.steps)):
        if tl.program_id(1) // heads == i:
            at = own + FORM.steps[i].begin * 32
            factor = tl.div_rn(safe * 0.0 + 1.0, safe * _unit(FORM, i))
            cells = CELLS + i * (2 * 513)
            viterbi(NUMBERS + at, BACK + at, CODES + at, factor, empty, cells, FORM, i)


@triton.jit
def _place_of_bits(place, WIDTH: tl.constexpr, INTERLEAVE: tl.constexpr):
    """Return which item of a word has the bits that begin at `place * WIDTH`."""
    return place % (INTERLEAVE // WIDTH) * (32 // INTERLEAVE) + place // (INTERLEAVE // WIDTH)


@triton.jit
def _bits_of_block(bits, item, codes, FORM: tl.constexpr, RUN: tl.constexpr, INDEX: tl.constexpr):
    """Add the bits of a block's codes `[words, 32]` at items of a run."""
    PLANE: tl.constexpr = FORM.runs[RUN].planes[INDEX]
    if PLANE is not None:
        BLOCK: tl.constexpr = FORM.steps[INDEX]
        ITEMS: tl.constexpr = 32 // FORM.trellis.interleave
        code = item - PLANE.before
        inside = (code >= 0) & (code < BLOCK.dim)
        step = code
        if BLOCK.words > 0:
            rest = code // ITEMS
            turn = code % ITEMS * BLOCK.wider + rest % BLOCK.wider
            step = turn * BLOCK.words + rest // BLOCK.wider
        at = ((BLOCK.begin + step) * 32)[:, None] + tl.arange(0, 32)[None, :]
        found = tl.load(codes + at, mask=inside[:, None], other=0).to(tl.int32)
        bits |= found >> PLANE.shift & PLANE.mask
    return bits


@triton.jit
def _store_run(words, codes, live, FORM: tl.constexpr, RUN: tl.constexpr):
    """Store the words of K of one run, of a tile's tokens."""
    ROW: tl.constexpr = FORM.runs[RUN].row
    COUNT: tl.constexpr = FORM.runs[RUN].end - ROW
    WIDTH: tl.constexpr = FORM.runs[RUN].width
    PER: tl.constexpr = 32 // WIDTH
    w, lane = tl.arange(0, power_of_two_of(COUNT)), tl.arange(0, 32)
    joined = tl.zeros((power_of_two_of(COUNT), 32), tl.int32)
    for place in range(PER):
        item = w * PER + _place_of_bits(place, WIDTH, FORM.trellis.interleave)
        bits = tl.zeros((power_of_two_of(COUNT), 32), tl.int32)
        for i in tl.static_range(len(FORM.steps)):
            bits = _bits_of_block(bits, item, codes, FORM, RUN, i)
        joined |= bits << (place * WIDTH)
    at = (lane // 16 * (FORM.words * 16) + lane % 16)[None, :] + ((ROW + w) * 16)[:, None]
    tl.store(words + at, joined, mask=(w < COUNT)[:, None] & live[None, :])


@triton.constexpr_function
def power_of_two_of(count):
    """Return the least power of two that is not below `count`."""
    return 1 << (count - 1).bit_length()


@triton.jit
def _add_rows(words, codes, FORM: tl.constexpr, HIGH: tl.constexpr):
    """Add a plane of a tile's codes to V's words, which hold tokens of a channel."""
    PLANE: tl.constexpr = FORM.steps[0].high if HIGH else FORM.steps[0].low
    WIDTH: tl.constexpr = PLANE.width
    PER: tl.constexpr = 32 // WIDTH
    r, d = tl.arange(0, WIDTH), tl.arange(0, FORM.padded)
    inside = tl.broadcast_to((d < FORM.dim)[None, :], (WIDTH, FORM.padded))
    joined = tl.full((WIDTH, FORM.padded), 0, tl.int32)
    for place in range(PER):
        token = r * PER + _place_of_bits(place, WIDTH, FORM.trellis.interleave)
        found = tl.load(codes + (d * 32)[None, :] + token[:, None], mask=inside, other=0)
        joined |= (found.to(tl.int32) >> PLANE.shift & PLANE.mask) << (place * WIDTH)
    at = words + ((PLANE.row + r) * FORM.dim)[:, None] + d[None, :]
    tl.store(at, tl.load(at, mask=inside, other=0) | joined, mask=inside)


@triton.jit(do_not_specialize=["start", "tokens", "tiles_per_segment", "batch", "segments"])
def store_codes(
    TABLE, HEADS, HELD, held_row, CODES,
    start, tokens, tiles_per_segment, batch, segments, FORM: tl.constexpr, BEHIND: tl.constexpr,
):  # fmt: skip
    """Store codes into slots; a program for every tile, head and row, as of `search_codes`."""
    head, row = tl.program_id(1), tl.program_id(2)
    position = first_position(HELD, held_row, start, row, BEHIND)
    tile, _, live = tile_tokens(position, tokens)
    slots = (TABLE, HEADS, row, head, batch, segments, tiles_per_segment)
    segment, tile = segment_at(slots, tile)
    units = units_of("codes", segment, FORM)
    words = units + tile * (FORM.words * 32 if FORM.order == "token" else FORM.bits * FORM.dim)
    codes = CODES + own_memory(FORM.dim * 32, tl.num_programs(1))
    if FORM.order == "token":
        for run in tl.static_range(len(FORM.runs)):
            _store_run(words, codes, live, FORM, run)
    else:
        _add_rows(words, codes, FORM, False)
        if FORM.steps[0].high.width > 0:
            _add_rows(words, codes, FORM, True)
