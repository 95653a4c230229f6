"""The numbers of trellis codes, to the bit those of `TrellisVectors.decode`.

A number needs its own code and the coded bits of the steps 1, 2 and `memory` before it. They lie in
other words of the same token (K) or of the same tokens (V), so each thread loads what it needs.

Bases of keys (see `methods.bases`), tile by tile: which they are, what they add to logits.
"""

import triton
import triton.language as tl

from kvpact.kernels.triton.transforms import tree_sum
from kvpact.methods import bases

MEAN, FIRST, NOTHING = (tl.constexpr(x) for x in (bases.MEAN, bases.FIRST, bases.NOTHING))


@triton.jit
def base_flags(flags, tile):
    """Return which base each of the 32 tokens of a tile of a segment and head has, int32."""
    token = tl.arange(0, 32)
    return tl.load(flags + tile * 2 + token // 16) >> (token % 16 * 2) & 3


@triton.jit
def base_logits(flags, mean, step, query, first, tile, channel, FORM: tl.constexpr):
    """Return the products of queries and the bases of 32 tokens, fp32 `[rows, 32]`.

    Of some `channel`s, int32: those of several calls are added, one of which has `first`. `flags`,
    `mean`, `step`: units of a segment's and head's fields, int32, int8, fp16. `query`: fp32
    `[rows, channels]`, scaled, not transformed; 0 after the last channel. `first`: fp32 `[rows]`,
    products with the first key; 0 where that is no base. `tile`: of 32 tokens in the segment.
    """
    flag = base_flags(flags, tile)
    logits = tl.where((flag == FIRST)[None, :], first[:, None], 0.0)
    if FORM.has("mean"):
        group = tile * 32 // FORM.trellis.center
        numbers = tl.load(mean + group * FORM.dim + channel, mask=channel < FORM.dim, other=0)
        product = tl.sum(query * numbers.to(tl.float32)[None, :], 1)
        at_mean = product * tl.load(step + group).to(tl.float32)
        logits = tl.where((flag == MEAN)[None, :], at_mean[:, None], logits)
    return logits


@triton.jit
def distance(rest, weight, FORM: tl.constexpr):
    """Return the square lengths of what bases leave of tokens, fp32 `[32, padded]`, weighted."""
    rest = rest * weight[None, :]
    return tree_sum(rest * rest, 32, FORM.padded, FORM.dim)


@triton.jit
def chosen_bases(far, to_first, to_mean):
    """Return the nearest bases of tokens, by their distances to nothing and to bases."""
    flag = tl.where(to_first < to_mean, FIRST, MEAN)
    return tl.where(far <= tl.minimum(to_mean, to_first), NOTHING, flag)


@triton.constexpr_function
def _several_planes(form, first, count):
    return any(block.high.width for block in form.steps[first : first + count])


@triton.jit
def _place(item, INTERLEAVE: tl.constexpr, WIDTH: tl.constexpr):
    """Return the first bit of an item of a word."""
    ITEMS: tl.constexpr = 32 // INTERLEAVE
    return (item % ITEMS * (INTERLEAVE // WIDTH) + item // ITEMS) * WIDTH


@triton.jit
def _step(channel, FORM: tl.constexpr, INDEX: tl.constexpr, BACK: tl.constexpr):
    """Return the step BACK (-1: `memory`) before a channel's; the last is before the first."""
    BLOCK: tl.constexpr = FORM.steps[INDEX]
    step = channel - BLOCK.begin - (BLOCK.memory if BACK < 0 else BACK)
    return tl.where(step < 0, step + BLOCK.dim, step)


@triton.jit
def _word_of_step(
    row,
    shift,
    channel,
    FORM: tl.constexpr,
    INDEX: tl.constexpr,
    BACK: tl.constexpr,
    HIGH: tl.constexpr,
):
    """Return rows and first bits of K's words (see `places`), of a block's channels those here."""
    BLOCK: tl.constexpr = FORM.steps[INDEX]
    PLANE: tl.constexpr = BLOCK.high if HIGH else BLOCK.low
    if PLANE.width > 0:
        PER_WORD: tl.constexpr = 32 // PLANE.width
        step = _step(channel, FORM, INDEX, BACK)
        code = step
        if BLOCK.words > 0:
            turn = step // BLOCK.words
            wider = step % BLOCK.words * BLOCK.wider + turn % BLOCK.wider
            code = wider * (32 // FORM.trellis.interleave) + turn // BLOCK.wider
        code += PLANE.before
        place = _place(code % PER_WORD, FORM.trellis.interleave, PLANE.width)
        inside = channel >= BLOCK.begin
        row = tl.where(inside, PLANE.row + code // PER_WORD, row)
        shift = tl.where(inside, place, shift)
    return row, shift


@triton.jit
def _items(
    codes,
    channel,
    live,
    FORM: tl.constexpr,
    FIRST: tl.constexpr,
    COUNT: tl.constexpr,
    BACK: tl.constexpr,
    HIGH: tl.constexpr,
):
    """Return the items of a plane at steps before each channel's, in the lowest bits."""
    token = tl.arange(0, 32)
    if FORM.order == "token":
        row, shift = channel * 0, channel * 0
        for i in tl.static_range(FIRST, FIRST + COUNT):
            row, shift = _word_of_step(row, shift, channel, FORM, i, BACK, HIGH)
        at = (token // 16 * (FORM.words * 16) + token % 16)[:, None] + (row * 16)[None, :]
        items = tl.load(codes + at, mask=live[None, :], other=0) >> shift[None, :]
    else:
        BLOCK: tl.constexpr = FORM.steps[FIRST]
        PLANE: tl.constexpr = BLOCK.high if HIGH else BLOCK.low
        PER_WORD: tl.constexpr = 32 // PLANE.width
        row = PLANE.row + token // PER_WORD
        at = (row * FORM.dim)[:, None] + _step(channel, FORM, FIRST, BACK)[None, :]
        shift = _place(token % PER_WORD, FORM.trellis.interleave, PLANE.width)
        items = tl.load(codes + at, mask=live[None, :], other=0) >> shift[:, None]
    return items


@triton.jit
def _of_block(mask, width, above, first, unit, channel, FORM: tl.constexpr, INDEX: tl.constexpr):
    """Return of each channel: masks of its planes, the lower one's width, first level, unit."""
    BLOCK: tl.constexpr = FORM.steps[INDEX]
    inside = channel >= BLOCK.begin
    mask, above = tl.where(inside, BLOCK.low.mask, mask), tl.where(inside, BLOCK.high.mask, above)
    width, first = tl.where(inside, BLOCK.low.width, width), tl.where(inside, BLOCK.levels, first)
    return mask, width, above, first, tl.where(inside, BLOCK.unit, unit)


@triton.jit
def e5m3(byte):
    """Return the numbers of 8-bit scales, fp32 (see `quantizers.numbers.from_e5m3`)."""
    byte = byte.to(tl.int32)
    return tl.where(byte == 0, 0, (byte + 888) << 20).to(tl.float32, bitcast=True)


@triton.jit
def step_numbers(
    codes, n, LEVELS, channel, live, FORM: tl.constexpr, FIRST: tl.constexpr, COUNT: tl.constexpr
):
    """Return level * unit * n of some channels of a tile, `[32, channels]`; 0 where not live.

    `n`: fp32 `[32]`, the scales; `LEVELS`: as of `trellis_numbers`; `channel`, `live`: channels,
    and which of them are of one of the blocks; `FIRST`, `COUNT`: the blocks among `FORM.steps`.
    """
    mask, width, above, first = channel * 0, channel * 0, channel * 0, channel * 0
    unit = channel.to(tl.float32)
    for i in tl.static_range(FIRST, FIRST + COUNT):
        mask, width, above, first, unit = _of_block(
            mask, width, above, first, unit, channel, FORM, i
        )
    own = _items(codes, channel, live, FORM, FIRST, COUNT, 0, False)
    coded = own ^ _items(codes, channel, live, FORM, FIRST, COUNT, 1, False)
    coded ^= _items(codes, channel, live, FORM, FIRST, COUNT, -1, False)
    code = own & mask[None, :]
    if _several_planes(FORM, FIRST, COUNT):
        high = _items(codes, channel, live & (above > 0), FORM, FIRST, COUNT, 0, True)
        code |= (high & above[None, :]) << width[None, :]
    second = _items(codes, channel, live, FORM, FIRST, COUNT, 2, False)
    index = (code >> 1) * 4 + (coded & 1) * 2 + (second & 1)
    level = tl.load(LEVELS + first[None, :] + index, mask=live[None, :], other=0.0)
    return level * unit[None, :] * n[:, None]


@triton.jit
def tile_words(codes, tile, FORM: tl.constexpr):
    """Return a pointer to the words of a tile of a segment and head."""
    return codes + tile * (FORM.words * (32 if FORM.order == "token" else FORM.dim))


@triton.jit
def trellis_numbers(codes, scale, LEVELS, tile, channel, FORM: tl.constexpr):
    """Return level * unit * n of some channels of 32 tokens, fp32 `[32, channels]`.

    Channels are the steps of the blocks' trellises; those after the last one are 0.

    `codes`, `scale`: units of the fields of a segment and head, int32 and uint8; `LEVELS`: fp32,
    those of all blocks (`Slots.levels`); `tile`: of 32 tokens inside the segment.
    """
    live = channel < FORM.steps[-1].begin + FORM.steps[-1].dim
    n = e5m3(tl.load(scale + tile * 32 + tl.arange(0, 32)))
    words = tile_words(codes, tile, FORM)
    return step_numbers(words, n, LEVELS, channel, live, FORM, 0, len(FORM.steps))
