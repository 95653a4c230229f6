"""The kernels that encode tokens: one by one, or with what their groups' kernel has stored.

The slots of tokens that are not there yet are zero. A word of V's codes holds several tokens, so it
is read, added to and written by the one program that has it.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kvpact.kernels.triton.encode.codes import (
    affine,
    codebook,
    float8,
    grid_between,
    on_grid,
    reciprocal,
    symmetric,
)
from kvpact.kernels.triton.slots import by_group, segment_at, units_of
from kvpact.kernels.triton.transforms import rotated, tree_sum


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

    `units`: to the codes of a segment and head: int32, or uint8 where there are no words;
    `codes`: int32 `[ROWS, padded]`; `first`: the place in the tile of the first token; `live`:
    `[ROWS]`: which tokens are to be stored.
    """
    d, inside = tl.arange(0, FORM.padded), first + tl.arange(0, ROWS)
    mask = live[:, None] & (d < FORM.dim)[None, :]
    if not FORM.in_words:
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


LARGEST_HALF = tl.constexpr(65504.0)
CHANNELS = 32  # channels that a program of `encode_groups` works on
_CHANNELS = tl.constexpr(CHANNELS)


@triton.jit
def as_fp32(x):
    """Return numbers as fp32."""
    if x.dtype == tl.bfloat16:
        # By hand: the interpreter's own cast gets numbers below the normal ones wrong.
        x = (x.to(tl.int16, bitcast=True).to(tl.int32) << 16).to(tl.float32, bitcast=True)
    return x.to(tl.float32)


@triton.jit
def load_tokens(x, row, head, token, live, FORM: tl.constexpr):
    """Return tokens as fp32 `[ROWS, padded]`, 0 for none; `x`: a pointer, and steps to others."""
    at, of_row, of_head, of_token = x
    d = tl.arange(0, FORM.padded)
    first = tl.cast(row, tl.int64) * of_row + tl.cast(head, tl.int64) * of_head
    place = first + token.to(tl.int64) * of_token
    mask = live[:, None] & (d < FORM.dim)[None, :]
    return as_fp32(tl.load(at + place[:, None] + d[None, :], mask=mask, other=0.0))


@triton.jit
def _on_grids(y, segment, tile, FORM: tl.constexpr):
    """Return codes on the grids that stand in the slots already."""
    step = by_group(units_of("fold", segment, FORM), tile, 0, FORM.padded, FORM)
    begin = by_group(units_of("shift", segment, FORM), tile, 0, FORM.padded, FORM)
    return on_grid(y, begin, reciprocal(step), (1 << FORM.bits) - 1)


@triton.jit
def _coded(y, tables, ROWS: tl.constexpr, FORM: tl.constexpr):
    """Return codes, scale and zero `[ROWS, padded_groups]` of tokens that stand for themselves."""
    if FORM.encoder == "codebook":
        codes, scale = codebook(y, tables[1], tables[2], ROWS, FORM)
        scale = scale[:, None]
        zero = scale
    elif FORM.encoder == "symmetric":
        codes, scale = symmetric(y, ROWS, FORM)
        zero = scale
    elif FORM.encoder == "affine":
        codes, scale, zero = affine(y, ROWS, FORM)
    else:
        codes, scale = float8(y, ROWS, FORM)
        scale = scale[:, None]
        zero = scale
    return codes, scale, zero


@triton.jit
def _beyond(numbers, live, GROUPS: tl.constexpr, COUNT: tl.constexpr):
    """Return whether side information of live tokens is beyond fp16."""
    there = live[:, None] & (tl.arange(0, GROUPS) < COUNT)[None, :]
    good = tl.abs(numbers.to(tl.float32)) <= LARGEST_HALF
    return tl.max(tl.max((there & ~good).to(tl.int32), 1), 0)


@triton.jit
def can_not_encode(x, live, tables, ROWS: tl.constexpr, FORM: tl.constexpr):
    """Return 1 if one of live tokens, fp32 `[ROWS, padded]`, can't be encoded, else 0.

    Only those beyond the limit have to be encoded to know. `tables`: see `Slots`.
    """
    beyond = tl.where(tl.abs(x) <= FORM.limit, 0, 1)
    bad = tl.max(tl.max(beyond, 1), 0)
    if FORM.lenient:  # noqa: SIM102 (known when it is compiled; the other is not)
        if bad > 0:
            known = tl.where(tl.abs(x) < float("inf"), 0, 1)
            if FORM.rotates:
                x = rotated(x, tables[0], ROWS, FORM.padded, FORM.dim)
            _, scale, zero = _coded(x, tables, ROWS, FORM)
            GROUPS: tl.constexpr = FORM.padded_groups
            COUNT: tl.constexpr = FORM.groups
            bad = tl.max(tl.max(known, 1), 0)
            bad = bad | _beyond(scale, live, GROUPS, COUNT)
            bad = bad | _beyond(zero, live, GROUPS, COUNT)
    return bad


@triton.jit
def encode_rows(
    x, slots, tables, row, head, position, start, tokens, ROWS: tl.constexpr, FORM: tl.constexpr
):
    """Encode the tokens at `ROWS` positions, a multiple of `ROWS` the first one.

    `x`: as of `load_tokens`; `slots`: as of `segment_at`; `tables`: as of `can_not_encode`.
    """
    token = position - start + tl.arange(0, ROWS)
    live = (token >= 0) & (token < tokens)
    segment, tile = segment_at(slots, position // 32)
    first = position % 32
    y = load_tokens(x, row, head, token, live, FORM)
    if FORM.rotates and not FORM.staged:
        y = rotated(y, tables[0], ROWS, FORM.padded, FORM.dim)
    if FORM.encoder == "channel":
        codes = _on_grids(y, segment, tile, FORM)
    else:
        if FORM.staged:
            y = y - by_group(units_of("shift", segment, FORM), tile, 0, FORM.padded, FORM)
        codes, scale, zero = _coded(y, tables, ROWS, FORM)
        GROUPS: tl.constexpr = FORM.padded_groups
        COUNT: tl.constexpr = FORM.groups
        if FORM.has("scale"):
            units = units_of("scale", segment, FORM)
            store_numbers(units, tile, scale, first, live, COUNT, ROWS, GROUPS)
        if FORM.encoder == "affine":
            units = units_of("zero", segment, FORM)
            store_numbers(units, tile, zero, first, live, COUNT, ROWS, GROUPS)
    store_codes(units_of("codes", segment, FORM), tile, codes, first, live, ROWS, FORM)


@triton.jit(do_not_specialize=["start", "tokens", "tiles_per_segment", "batch", "segments"])
def encode_tokens(
    X, x_row, x_head, x_token, TABLE, HEADS, SIGNS, BOUNDARIES, LEVELS, start, tokens,
    tiles_per_segment, batch, segments, ROWS: tl.constexpr, SPAN: tl.constexpr, FORM: tl.constexpr,
):  # fmt: skip
    """Encode the tokens of one row and head that stand at `SPAN` positions, `ROWS` at a time.

    The grid has as many programs as spans that the tokens may be in, heads and rows.

    `X`: to the first token: fp32, fp16 or bf16. Rotated ones where `FORM.staged`. `x_row`,
    `x_head`, `x_token`: strides of `X`, in numbers. `TABLE`, `HEADS`, `batch`, `segments`,
    `tiles_per_segment`: as of `slots.segment_at`. `SIGNS`, `BOUNDARIES`, `LEVELS`: see
    `Slots`. `start`: position of the first token, counted from the first of the segments.
    `ROWS`, `SPAN`: powers of two up to 32.
    """
    head, row = tl.program_id(1), tl.program_id(2)
    x, tables = (X, x_row, x_head, x_token), (SIGNS, BOUNDARIES, LEVELS)
    slots = (TABLE, HEADS, row, head, batch, segments, tiles_per_segment)
    span = start // SPAN + tl.program_id(0)
    low = tl.maximum(span * SPAN, start) // ROWS * ROWS
    for position in range(low, tl.minimum(span * SPAN + SPAN, start + tokens), ROWS):
        encode_rows(x, slots, tables, row, head, position, start, tokens, ROWS, FORM)
        # Another thread may go on with the same words.
        if SPAN != ROWS:
            tl.debug_barrier()


@triton.jit(do_not_specialize=["tokens"])
def check_tokens(
    X, x_row, x_head, x_token, SIGNS, BOUNDARIES, LEVELS, GOOD, tokens, ROWS: tl.constexpr,
    FORM: tl.constexpr,
):  # fmt: skip
    """Store 0 to `GOOD`, int8, where a token can't be encoded; parameters as of `encode_tokens`."""
    block, head, row = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    token = block * ROWS + tl.arange(0, ROWS)
    live = token < tokens
    x = load_tokens((X, x_row, x_head, x_token), row, head, token, live, FORM)
    bad = can_not_encode(x, live, (SIGNS, BOUNDARIES, LEVELS), ROWS, FORM)
    tl.store(GOOD, 0, mask=bad != 0)


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
def _store_per_channel(NAME: tl.constexpr, numbers, channel, segment, tile, FORM: tl.constexpr):
    """Store a number per channel, fp16, of the group that begins with a tile."""
    unit = tile * 32 // FORM.group
    place = units_of(NAME, segment, FORM) + unit * FORM.dim + channel
    tl.store(place, numbers, mask=channel < FORM.dim)


@triton.jit(do_not_specialize=["start", "tiles_per_segment", "batch", "segments"])
def encode_groups(
    X, x_row, x_head, x_token, TABLE, HEADS, start, tiles_per_segment, batch, segments,
    FORM: tl.constexpr,
):  # fmt: skip
    """Store means or grids per channel: programs for groups, `CHANNELS` channels, heads, rows."""
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
    if FORM.encoder == "channel":
        scale, zero = grid_between(tl.min(x, 1), tl.max(x, 1), FORM.bits)
        _store_per_channel("fold", scale, channel, segment, tile, FORM)
        _store_per_channel("shift", zero, channel, segment, tile, FORM)
    else:
        # A power of two divides without rounding, but for what is below the normal numbers.
        count = tl.full((_CHANNELS,), FORM.group, tl.float32)
        mean = tl.div_rn(tree_sum(x, _CHANNELS, FORM.group, FORM.group), count).to(tl.float16)
        _store_per_channel("shift", mean, channel, segment, tile, FORM)
