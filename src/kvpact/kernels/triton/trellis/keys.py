"""K's codes of trellises as the left operand of integer products; see `tiles` for the order.

A code's level needs the coded bits of steps before it, which stand at the same place of other
words (see `methods.trellis_codec.places`). So thread t of the four of a row takes byte t of *all*
words of a token: nothing has to come from another thread.
"""

import triton
import triton.language as tl

from kvpact.kernels.triton.digits.levels import bytes_of, order_of_k, prmt, row_of
from kvpact.kernels.triton.digits.tiles import grouped, token_places
from kvpact.kernels.triton.forms import SlotForm
from kvpact.kernels.triton.transforms import block_of
from kvpact.kernels.triton.trellis.levels import (
    KEEP,
    PAIR,
    TURNED,
    apart,
    block_table,
    first_word,
    levels8,
    spread,
    stacked,
    words_of,
)

_AXIS = tl.constexpr(4)
_RANK = tl.constexpr(6)


@triton.constexpr_function
def eights(form: SlotForm, index: int) -> int:
    """Return how many times eight codes a thread has of a block of a token, filled up."""
    block = form.steps[index]
    return max(block.words // 4, 1) * (2 if block.low.width == 2 else 1)


@triton.constexpr_function
def halves(form: SlotForm, index: int) -> int:
    """Return the words of levels that are made of eight codes: 1 where the upper four are none."""
    return 2 if form.steps[index].words >= 4 else 1


@triton.constexpr_function
def operand_width(form: SlotForm, index: int) -> int:
    """Return the channels of a block's operand, filled up to one step of the product."""
    return max(eights(form, index) * halves(form, index) * 16, 32)


@triton.constexpr_function
def key_begin(form: SlotForm, index: int) -> int:
    """Return the channels of the operands of the blocks before one."""
    return sum(operand_width(form, i) for i in range(index))


@triton.constexpr_function
def _turn(form, index):
    """Return the bits from a step's place in a word to the next one's."""
    block = form.steps[index]
    return block.low.width if block.bits > 1 else form.trellis.interleave


@triton.constexpr_function
def _upper_word(form, index, word):
    """Return which word of a token has the bits of the upper plane of a block's word."""
    block, per = form.steps[index], form.trellis.interleave // form.steps[index].high.width
    before = block.high.before * form.trellis.interleave // 32
    return block.high.row + (word * block.wider + before) // per


@triton.constexpr_function
def _upper_shift(form, index, word):
    """Return where these bits begin there."""
    block, per = form.steps[index], form.trellis.interleave // form.steps[index].high.width
    before = block.high.before * form.trellis.interleave // 32
    return (word * block.wider + before) % per * block.high.width


@triton.jit
def _load(tiles, live, ROW: tl.constexpr, COUNT: tl.constexpr, WORDS: tl.constexpr,
          VBITS: tl.constexpr):  # fmt: skip
    """Load words of each token, a tuple of `[S, X, U, R, 1, J]`."""
    # The hint stands after the reshape: older versions lose it there, and would copy 4 bytes.
    base = grouped(tiles, VBITS)[:, None, None, :, None, None]
    base = tl.multiple_of(base, [16, 16, 16, 16, 16, 16])
    seen = grouped(live, VBITS)[:, None, None, :, None, None]
    word = (ROW + tl.arange(0, COUNT)) * 16
    place = token_places(VBITS, WORDS * 16)[None, None, :, None, :, :]
    x = tl.load(base + word[None, :, None, None, None, None] + place, mask=seen, other=0)
    return apart(tl.expand_dims(x.permute(0, 2, 3, 4, 5, 1), 4), COUNT)


@triton.jit
def key_words(tiles, live, FIRST: tl.constexpr, FORM: tl.constexpr, VBITS: tl.constexpr):
    """Load all words of each token from FIRST on, a tuple; `VBITS`: see `token_places`."""
    COUNT: tl.constexpr = block_of(FORM.words - FIRST)
    words = _load(tiles, live, FIRST, COUNT, FORM.words, VBITS)
    if FORM.words > FIRST + COUNT:
        words += key_words(tiles, live, FIRST + COUNT, FORM, VBITS)
    return words


@triton.jit
def _of_block(held, FORM: tl.constexpr, INDEX: tl.constexpr):
    """Return the words that a block's steps take turns in; of one bit these are shifted ones."""
    BLOCK: tl.constexpr = FORM.steps[INDEX]
    COUNT: tl.constexpr = BLOCK.words
    C: tl.constexpr = FORM.trellis.interleave
    BEFORE: tl.constexpr = BLOCK.low.before * C // 32
    words = ()
    for i in tl.static_range(COUNT):
        if BLOCK.bits > 1:
            words += (held[BLOCK.low.row + i],)
        else:
            words += (held[BLOCK.low.row + (BEFORE + i) // C] >> ((BEFORE + i) % C),)
    return words


@triton.jit
def _turned(word, BITS: tl.constexpr):
    """Turn words to the left."""
    if BITS > 0:
        x = word.to(tl.uint32, bitcast=True)
        word = (x << BITS | x >> (32 - BITS)).to(tl.int32, bitcast=True)
    return word


@triton.jit
def _step(words, STEP: tl.constexpr, TURN: tl.constexpr):
    """Return the word of a step; those before a word's first are one place further in the last."""
    COUNT: tl.constexpr = len(words)
    return _turned(words[STEP % COUNT], -(STEP // COUNT) * TURN)


@triton.jit
def _bytes(words, pair, turned, FIRST: tl.constexpr, STRIDE: tl.constexpr, TURN: tl.constexpr,
           ASM: tl.constexpr):  # fmt: skip
    """Take a byte of each of up to four steps FIRST, FIRST + STRIDE, …: a word."""
    COUNT: tl.constexpr = len(words)
    if COUNT == 1:
        word = _step(words, FIRST, TURN)
        found = prmt(word, word, pair, ASM)
    elif COUNT == 2:
        found = prmt(_step(words, FIRST, TURN), _step(words, FIRST + 1, TURN), pair, ASM)
    elif FIRST < 0 and FIRST + STRIDE >= 0:
        # All but the first byte are those of other steps, a byte further.
        rest = _bytes(words, pair, turned, FIRST + STRIDE, STRIDE, TURN, ASM)
        found = prmt(rest, _step(words, FIRST, TURN), turned, ASM)
    else:
        low = prmt(_step(words, FIRST, TURN), _step(words, FIRST + STRIDE, TURN), pair, ASM)
        third = _step(words, FIRST + 2 * STRIDE, TURN)
        high = prmt(third, _step(words, FIRST + 3 * STRIDE, TURN), pair, ASM)
        found = prmt(low, high, tl.full([1], 0x5410, tl.int32).reshape(1, 1, 1, 1, 1, 1), ASM)
    return found


@triton.jit
def _before(words, pair, turned, BACK: tl.constexpr, TURN: tl.constexpr, ASM: tl.constexpr):
    """Take a byte of each of the steps so many before those of words, four together."""
    STRIDE: tl.constexpr = max(len(words) // 4, 1)
    found = ()
    for i in tl.static_range(STRIDE):
        found += (_bytes(words, pair, turned, i - BACK, STRIDE, TURN, ASM),)
    return stacked(found, 0, STRIDE)


@triton.jit
def _above(held, pair, FORM: tl.constexpr, INDEX: tl.constexpr, ASM: tl.constexpr):
    """Take the bits of the upper plane of a block's steps, in nibbles, as `_before` does."""
    BLOCK: tl.constexpr = FORM.steps[INDEX]
    COUNT: tl.constexpr = BLOCK.words
    words = ()
    for i in tl.static_range(COUNT):
        word = held[_upper_word(FORM, INDEX, i)] >> _upper_shift(FORM, INDEX, i)
        words += (word,)
    above = _before(words, pair, pair, 0, 0, ASM)
    if FORM.trellis.interleave == 8:
        above = spread(above, BLOCK.high.width if BLOCK.low.width == 4 else 2)
    return above


@triton.jit
def key_levels(
    held, TABLE, FORM: tl.constexpr, INDEX: tl.constexpr, KW: tl.constexpr, ASM: tl.constexpr
):
    """Return the levels of a block of K, int8 `[N, operand_width]`; see `key_places`.

    `FORM`, `INDEX`: the `SlotForm`, and the place of the block among its steps; `KW`: bytes of k
    that stand side by side in a thread; `ASM`: whether the device knows PTX.
    """
    BLOCK: tl.constexpr = FORM.steps[INDEX]
    TURN: tl.constexpr = _turn(FORM, INDEX)
    STRIDE: tl.constexpr = max(BLOCK.words // 4, 1)
    pair, turned = row_of(TABLE, PAIR, _AXIS, _RANK), row_of(TABLE, TURNED, _AXIS, _RANK)
    keep = row_of(TABLE, KEEP, _AXIS, _RANK + 1)
    table = block_table(TABLE, first_word(FORM, INDEX), words_of(BLOCK.bits), _AXIS, _RANK + 1)
    words = _of_block(held, FORM, INDEX)
    own = _before(words, pair, turned, 0, TURN, ASM)
    second = _before(words, pair, turned, 2, TURN, ASM)
    flip = _before(words, pair, turned, 1, TURN, ASM)
    flip ^= _before(words, pair, turned, BLOCK.memory, TURN, ASM)
    above = own
    if BLOCK.high.width > 0:
        above = _above(held, pair, FORM, INDEX, ASM)
    FIELDS: tl.constexpr = eights(FORM, INDEX) // STRIDE
    found = ()
    for q in tl.static_range(FIELDS):
        levels = levels8(
            own >> (2 * q), flip >> (2 * q), second >> (2 * q), above >> q, table, keep,
            BLOCK.bits, ASM,
        )  # fmt: skip
        if halves(FORM, INDEX) == 2:
            found += levels
        else:
            found += (levels[0],)
    if len(found) == 1:
        found += found
    COUNT: tl.constexpr = len(found) * STRIDE
    x = bytes_of(stacked(found, 0, len(found)))
    x = x.reshape(_split(x.shape, COUNT))
    # S X U R t J | chunk, half | low, high bit of the byte
    x = x.permute(order_of_k(KW, (0, 1, 5, 2, 3, 6, 7, 4, 9, 8)))
    return x.reshape(_operand(x.shape, COUNT * 16))


@triton.constexpr_function
def _split(shape, count):
    return (*shape[:6], count // 2, 2, 2, 2)


@triton.constexpr_function
def _operand(shape, width):
    return (shape[0] * shape[1] * shape[2] * shape[3] * shape[4], width)


@triton.constexpr_function
def key_places(form: SlotForm, index: int, kw: int) -> tuple[int, ...]:
    """Return the channel at each place k of `key_levels`, -1 where there is none."""
    block, turn = form.steps[index], _turn(form, index)
    stride, half = max(block.words // 4, 1), halves(form, index)
    fields = eights(form, index) // stride
    count = max(stride * fields * half, 2)
    places = []
    for place in range(count * 16):
        k = place
        if kw == 8:  # (…, t, x, 4 bytes) in place of (…, x, t, 4 bytes)
            k = (place // 32) * 32 + (place // 4 % 2) * 16 + (place // 8 % 4) * 4 + place % 4
        found, t = k // 32 * 2 + (k >> 4 & 1), k >> 2 & 3
        nibble = found % half * 4 + k % 4
        eight = found // half
        word = eight // fields + nibble // 2 * stride
        if nibble // 2 >= block.words or eight >= stride * fields:
            places.append(-1)
            continue
        bit = t * 8 + nibble % 2 * 4 + eight % fields * 2
        places.append(block.begin + bit // turn * block.words + word)
    return tuple(places)
