"""Codes of trellises as levels, 8-bit whole numbers, word by word: for integer products.

A *wider* word (see `formats.bitpack`) holds the indices of 32 / interleave steps. From bit 0 on, an
index is here: c1, the point's bits in the lowest plane, c0, the point's other bits. So all indices
of a wider word take a few operations on words, and so do the lookups (`levels`).
"""

import triton
import triton.language as tl

from kvpact.kernels.triton.levels import bytes_of, levels4, prmt

MOST_LEVELS = 128
"""Levels of a block's table."""
_WORDS = tl.constexpr(MOST_LEVELS // 4)


@triton.constexpr_function
def everywhere(form, bits):
    """Return a mask of the lowest bits of every item of a wider word, as int32."""
    found = sum(((1 << bits) - 1) << place for place in range(0, 32, form.trellis.interleave))
    return found - (1 << 32) if found >> 31 else found


@triton.constexpr_function
def wider_words(form, index):
    """Return how many wider words the steps of a block fill."""
    return form.steps[index].dim * form.trellis.interleave // 32


@triton.jit
def _turned(word, bits):
    """Turn words to the left."""
    word = word.to(tl.uint32, bitcast=True)
    return (word << bits | word >> (32 - bits & 31)).to(tl.int32, bitcast=True)


@triton.jit
def _indices(own, first, second, far, above, shift, FORM: tl.constexpr, INDEX: tl.constexpr):
    """Return wider words of indices; `above` holds the other plane's bits, in place."""
    BLOCK: tl.constexpr = FORM.steps[INDEX]
    LOW: tl.constexpr = BLOCK.low.width
    # Bit 0 of a code is its coded bit: c1 takes the place.
    coded = (first ^ far) & everywhere(FORM, 1)
    x = ((own >> shift) & everywhere(FORM, LOW)) ^ coded
    x |= (second & everywhere(FORM, 1)) << LOW
    if BLOCK.high.width > 0:
        x |= above << (LOW + 1)
    return x


@triton.jit
def _table(TABLE, WORD: tl.constexpr, INDEX: tl.constexpr, x):
    """Return four levels of a block's table, as a word beside each of `x`."""
    return tl.broadcast_to(tl.load(TABLE + INDEX * _WORDS + WORD), x.shape)


@triton.jit
def _chosen(x, BIT: tl.constexpr, low, high):
    """Return bytes of `low`, or of `high` where a bit of the byte of `x` is set."""
    mask = (x >> BIT & 0x01010101) * 0xFF
    return (low & ~mask) | (high & mask)


@triton.jit
def _eight(x, selector, TABLE, INDEX: tl.constexpr, FIRST: tl.constexpr, ASM: tl.constexpr):
    """Look up the lowest 3 bits of each byte among the levels from 8 FIRST on."""
    low, high = _table(TABLE, 2 * FIRST, INDEX, x), _table(TABLE, 2 * FIRST + 1, INDEX, x)
    return prmt(low, high, selector, ASM)


@triton.jit
def _lookup(
    x, selector, TABLE, INDEX: tl.constexpr, FIRST: tl.constexpr, BITS: tl.constexpr,
    ASM: tl.constexpr,
):  # fmt: skip
    """Look up the lowest BITS bits of each byte among the levels from 8 FIRST on."""
    if BITS <= 3:
        found = _eight(x, selector, TABLE, INDEX, FIRST, ASM)
    else:
        HALF: tl.constexpr = 1 << (BITS - 4)
        low = _lookup(x, selector, TABLE, INDEX, FIRST, BITS - 1, ASM)
        high = _lookup(x, selector, TABLE, INDEX, FIRST + HALF, BITS - 1, ASM)
        found = _chosen(x, BITS - 1, low, high)
    return found


@triton.jit
def _items(x, TABLE, INTERLEAVE: tl.constexpr, INDEX: tl.constexpr, BITS: tl.constexpr,
           ASM: tl.constexpr):  # fmt: skip
    """Look up the items of wider words `[A, B, C]`: int8 `[A, B, C, items]`."""
    A: tl.constexpr = x.shape[0]
    B: tl.constexpr = x.shape[1]
    C: tl.constexpr = x.shape[2]
    if INTERLEAVE == 4:
        t0, t1 = _table(TABLE, 0, INDEX, x), _table(TABLE, 1, INDEX, x)
        t2, t3 = _table(TABLE, 2, INDEX, x), _table(TABLE, 3, INDEX, x)
        levels = levels4(x, t0, t1, t2, t3, ASM).permute(0, 1, 2, 5, 4, 3).reshape(A, B, C, 8)
    else:
        pairs = x & 0x07070707
        pairs = pairs | pairs >> 4
        selector = (pairs & 0x77) | (pairs >> 8 & 0x7700)
        found = _lookup(x, selector, TABLE, INDEX, 0, BITS + 1, ASM)
        levels = bytes_of(found).permute(0, 1, 2, 4, 3).reshape(A, B, C, 4)
    return levels


@triton.jit
def key_levels(tiles, live, TABLE, FORM: tl.constexpr, INDEX: tl.constexpr, ASM: tl.constexpr):
    """Return the levels of a block of K, int8 `[tiles * 32, channels]`, in the order of its codes.

    A block of 16 channels has a zero behind each of them.

    Parameters
    ----------
    tiles : pointers to i32 [NT]
        The codes of each tile.
    live : tensor
        Tiles that are there.
    TABLE : pointer
        int32 `[blocks that have bits, MOST_LEVELS / 4]`: levels, a byte each.
    FORM, INDEX : constexpr
        The `SlotForm`, and the place of the block among its steps.
    ASM : constexpr
        Whether the device knows PTX.
    """
    BLOCK: tl.constexpr = FORM.steps[INDEX]
    LOW: tl.constexpr = BLOCK.low
    C: tl.constexpr = FORM.trellis.interleave
    COUNT: tl.constexpr = wider_words(FORM, INDEX)
    token = tl.arange(0, 32)
    at = tiles[:, None, None] + (token // 16 * (FORM.words * 16) + token % 16)[None, :, None]
    seen = tl.broadcast_to(live[:, None, None], (tiles.shape[0], 32, COUNT))
    wide = tl.arange(0, COUNT)
    word, shift = wide // BLOCK.wider, (wide % BLOCK.wider * LOW.width)[None, None, :]
    own = _key_words(at, seen, word, 0, FORM, INDEX)
    first = _key_words(at, seen, word, 1, FORM, INDEX) >> shift
    second = _key_words(at, seen, word, 2, FORM, INDEX) >> shift
    far = _key_words(at, seen, word, BLOCK.memory, FORM, INDEX) >> shift
    above = own
    if BLOCK.high.width > 0:
        HIGH: tl.constexpr = BLOCK.high
        PER: tl.constexpr = C // HIGH.width
        place = wide + HIGH.before * C // 32
        row = HIGH.row + place // PER
        above = tl.load(at + (row * 16)[None, None, :], mask=seen, other=0)
        above = above >> (place % PER * HIGH.width)[None, None, :]
        above = above & everywhere(FORM, HIGH.width)
    x = _indices(own, first, second, far, above, shift, FORM, INDEX)
    levels = _items(x, TABLE, C, INDEX, BLOCK.bits, ASM)
    levels = levels.reshape(tiles.shape[0] * 32, COUNT * (32 // C))
    if BLOCK.dim < 32:
        # Products have 32 channels at least: zeros stand between those of a narrow block.
        levels = tl.join(levels, tl.zeros_like(levels)).reshape(tiles.shape[0] * 32, 32)
    return levels


@triton.jit
def _key_words(at, seen, word, BACK: tl.constexpr, FORM: tl.constexpr, INDEX: tl.constexpr):
    """Load words of the lowest plane whose steps are so many before those of the given ones."""
    BLOCK: tl.constexpr = FORM.steps[INDEX]
    LOW: tl.constexpr = BLOCK.low
    C: tl.constexpr = FORM.trellis.interleave
    # The steps before a word's first one are those of the last words, one place further.
    turns = (BLOCK.words - 1 - word + BACK) // BLOCK.words
    before = word - BACK + turns * BLOCK.words
    if BLOCK.bits == 1:
        place = before + LOW.before * C // 32
        words = tl.load(at + ((LOW.row + place // C) * 16)[None, None, :], mask=seen, other=0)
        words = (words >> (place % C)[None, None, :]) & everywhere(FORM, 1)
        words = _turned(words, (turns * C)[None, None, :])
    else:
        words = tl.load(at + ((LOW.row + before) * 16)[None, None, :], mask=seen, other=0)
        words = _turned(words, (turns * LOW.width)[None, None, :])
    return words


@triton.jit
def value_levels(tiles, live, TABLE, FORM: tl.constexpr, ASM: tl.constexpr):
    """Return the levels of V, int8 `[channels, tiles * 32]`; parameters as of `key_levels`."""
    BLOCK: tl.constexpr = FORM.steps[0]
    LOW: tl.constexpr = BLOCK.low
    C: tl.constexpr = FORM.trellis.interleave
    D: tl.constexpr = FORM.dim
    NT: tl.constexpr = tiles.shape[0]
    wide, channel = tl.arange(0, C), tl.arange(0, D)
    row = LOW.row + wide // (C // LOW.width)
    shift = (wide % (C // LOW.width) * LOW.width)[None, :, None]
    at = tiles[:, None, None] + (row * D)[None, :, None]
    seen = tl.broadcast_to(live[:, None, None], (NT, C, D))
    own = tl.load(at + channel[None, None, :], mask=seen, other=0)
    first = tl.load(at + ((channel + D - 1) % D)[None, None, :], mask=seen, other=0) >> shift
    second = tl.load(at + ((channel + D - 2) % D)[None, None, :], mask=seen, other=0) >> shift
    back = (channel + D - BLOCK.memory) % D
    far = tl.load(at + back[None, None, :], mask=seen, other=0) >> shift
    above = own
    if BLOCK.high.width > 0:
        HIGH: tl.constexpr = BLOCK.high
        PER: tl.constexpr = C // HIGH.width
        line = tiles[:, None, None] + ((HIGH.row + wide // PER) * D)[None, :, None]
        above = tl.load(line + channel[None, None, :], mask=seen, other=0)
        above = above >> (wide % PER * HIGH.width)[None, :, None]
        above = above & everywhere(FORM, HIGH.width)
    x = _indices(own, first, second, far, above, shift, FORM, 0)
    levels = _items(x, TABLE, C, 0, BLOCK.bits, ASM)
    return levels.permute(2, 0, 1, 3).reshape(D, NT * 32)
