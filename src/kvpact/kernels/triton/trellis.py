"""The numbers of trellis codes, to the bit those of `TrellisVectors.decode`.

A number needs its own code and the coded bits of the steps 1, 2 and `memory` before it. They lie in
other words of the same token (K) or of the same tokens (V), so each thread loads what it needs.
"""

import triton
import triton.language as tl


@triton.constexpr_function
def _several_planes(blocks):
    return any(block.high.width for block in blocks)


@triton.jit
def _place(item, INTERLEAVE: tl.constexpr, WIDTH: tl.constexpr):
    """Return the first bit of an item of a word."""
    ITEMS: tl.constexpr = 32 // INTERLEAVE
    return (item % ITEMS * (INTERLEAVE // WIDTH) + item // ITEMS) * WIDTH


@triton.jit
def _step(channel, BLOCK: tl.constexpr, BACK: tl.constexpr):
    """Return the step so many before that of a channel; the last one is before the first."""
    step = channel - BLOCK.begin - (BLOCK.memory if BACK < 0 else BACK)
    return tl.where(step < 0, step + BLOCK.dim, step)


@triton.jit
def _word_of_step(step, BLOCK: tl.constexpr, PLANE: tl.constexpr, INTERLEAVE: tl.constexpr):
    """Return the row of a step's word in K, and the step's first bit (see `places`)."""
    PER_WORD: tl.constexpr = 32 // PLANE.width
    code = step
    if BLOCK.words > 0:
        turn = step // BLOCK.words
        wider = step % BLOCK.words * BLOCK.wider + turn % BLOCK.wider
        code = wider * (32 // INTERLEAVE) + turn // BLOCK.wider
    code += PLANE.before
    return PLANE.row + code // PER_WORD, _place(code % PER_WORD, INTERLEAVE, PLANE.width)


@triton.jit
def _words_of_steps(channel, FORM: tl.constexpr, BACK: tl.constexpr, HIGH: tl.constexpr):
    """Return the rows and first bits of the steps so many before each channel's, in K."""
    BLOCKS: tl.constexpr = FORM.steps
    row, shift = channel * 0, channel * 0
    for i in tl.static_range(len(BLOCKS)):
        if (BLOCKS[i].high if HIGH else BLOCKS[i].low).width > 0:
            its_row, its_shift = _word_of_step(
                _step(channel, BLOCKS[i], BACK),
                BLOCKS[i],
                BLOCKS[i].high if HIGH else BLOCKS[i].low,
                FORM.trellis.interleave,
            )
            inside = channel >= BLOCKS[i].begin
            row, shift = tl.where(inside, its_row, row), tl.where(inside, its_shift, shift)
    return row, shift


@triton.jit
def _items(codes, token, channel, live, FORM: tl.constexpr, BACK: tl.constexpr, HIGH: tl.constexpr):
    """Return the items of a plane at steps before each channel's, in the lowest bits.

    BACK: how many steps before; -1 for as many as the trellis remembers.
    """
    if FORM.order == "token":
        row, shift = _words_of_steps(channel, FORM, BACK, HIGH)
        at = (token // 16 * (FORM.words * 16) + token % 16)[:, None] + (row * 16)[None, :]
        items = tl.load(codes + at, mask=live[None, :], other=0) >> shift[None, :]
    else:
        BLOCK: tl.constexpr = FORM.steps[0]
        PLANE: tl.constexpr = BLOCK.high if HIGH else BLOCK.low
        PER_WORD: tl.constexpr = 32 // PLANE.width
        row = PLANE.row + token // PER_WORD
        at = (row * FORM.dim)[:, None] + _step(channel, BLOCK, BACK)[None, :]
        shift = _place(token % PER_WORD, FORM.trellis.interleave, PLANE.width)
        items = tl.load(codes + at, mask=live[None, :], other=0) >> shift[:, None]
    return items


@triton.jit
def _of_blocks(channel, BLOCKS: tl.constexpr):
    """Return of each channel: masks of its planes, the lower one's width, first level, unit."""
    mask, width = channel * 0 + BLOCKS[0].low.mask, channel * 0 + BLOCKS[0].low.width
    above, first = channel * 0 + BLOCKS[0].high.mask, channel * 0
    unit = tl.full(channel.shape, BLOCKS[0].unit, tl.float32)
    for i in tl.static_range(1, len(BLOCKS)):
        later = channel >= BLOCKS[i].begin
        mask, width = (
            tl.where(later, BLOCKS[i].low.mask, mask),
            tl.where(later, BLOCKS[i].low.width, width),
        )
        above, first = (
            tl.where(later, BLOCKS[i].high.mask, above),
            tl.where(later, BLOCKS[i].levels, first),
        )
        unit = tl.where(later, BLOCKS[i].unit, unit)
    return mask, width, above, first, unit


@triton.jit
def e5m3(byte):
    """Return the numbers of 8-bit scales, fp32 (see `quantizers.numbers.from_e5m3`)."""
    byte = byte.to(tl.int32)
    return tl.where(byte == 0, 0, (byte + 888) << 20).to(tl.float32, bitcast=True)


@triton.jit
def trellis_numbers(codes, scale, LEVELS, tile, FORM: tl.constexpr):
    """Return level * unit * n of 32 tokens, fp32 `[32, FORM.padded]`; 0 behind the last channel.

    Channels are the steps of the blocks' trellises.

    Parameters
    ----------
    codes, scale : pointer
        Units of the fields of a segment and head, int32 and uint8.
    LEVELS : pointer
        fp32, those of all blocks (`Slots.levels`).
    tile : int
        Of 32 tokens inside the segment.
    FORM : constexpr
        The `SlotForm`.
    """
    token, channel = tl.arange(0, 32), tl.arange(0, FORM.padded)
    codes += tile * (FORM.words * (32 if FORM.order == "token" else FORM.dim))
    live = channel < FORM.steps[-1].begin + FORM.steps[-1].dim
    mask, width, above, first, unit = _of_blocks(channel, FORM.steps)
    own = _items(codes, token, channel, live, FORM, 0, False)
    coded = own ^ _items(codes, token, channel, live, FORM, 1, False)
    coded ^= _items(codes, token, channel, live, FORM, -1, False)
    code = own & mask[None, :]
    if _several_planes(FORM.steps):
        high = _items(codes, token, channel, live & (above > 0), FORM, 0, True)
        code |= (high & above[None, :]) << width[None, :]
    second = _items(codes, token, channel, live, FORM, 2, False)
    index = (code >> 1) * 4 + (coded & 1) * 2 + (second & 1)
    level = tl.load(LEVELS + first[None, :] + index, mask=live[None, :], other=0.0)
    n = e5m3(tl.load(scale + tile * 32 + token))
    return level * unit[None, :] * n[:, None]
