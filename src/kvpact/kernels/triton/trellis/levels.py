"""Codes of trellises as levels of 8 bits, in registers: eight codes at a time.

The eight codes stand in the nibbles of a word. An index has the bits c1, c0 and the point's bits
p0, p1, …; four levels are looked up by `prmt` with three of the index' bits, and the halves of
longer tables are read by `prmt` too, with one bit of each index in the selector.
"""

import triton
import triton.language as tl

from kvpact.kernels.triton.digits.levels import prmt, row_of

CONSTANTS = (
    (0x4040, 0x5151, 0x6262, 0x7373),
    (0x2104, 0x2105, 0x2106, 0x2107),
    (0x32103210,) * 4,
    (0, 2, 4, 6),
    (0, 4, 0, 4),
    (0, 2, 0, 2),
)
"""Rows of a table before its levels; a number for each of four threads:

selectors of a byte of two words, twice, and of a byte of the second one before three of the first
one's; one that keeps a word, twice; shifts of thread t by 2t, by 4 (t % 2), by 2 (t % 2).
"""
PAIR, TURNED, KEEP, BY_2, BY_4_HALF, BY_2_HALF = (tl.constexpr(i) for i in range(6))
_BEFORE = len(CONSTANTS)


@triton.constexpr_function
def first_word(form, index):
    """Return the row of a table where the levels of a block begin."""
    return _BEFORE + sum(words_of(block.bits) for block in form.steps[:index])


@triton.constexpr_function
def words_of(bits):
    """Return the words of a table of levels."""
    return (2 << bits) // 4


@triton.jit
def block_table(TABLE, FIRST: tl.constexpr, COUNT: tl.constexpr, AXIS: tl.constexpr,
                RANK: tl.constexpr):  # fmt: skip
    """Load the words of a block's table, a tuple."""
    words = ()
    for i in tl.static_range(COUNT):
        words += (row_of(TABLE, FIRST + i, AXIS, RANK),)
    return words


@triton.jit
def _chosen(bit, keep):
    """Return a selector that takes bytes of the first word, or of the second where bit 2 is set."""
    return (bit & 0x44444444) | keep


@triton.jit
def _found(selector, choices, words, FIRST: tl.constexpr, COUNT: tl.constexpr,
           DEPTH: tl.constexpr, ASM: tl.constexpr):  # fmt: skip
    """Look up four codes among COUNT words of a table."""
    if COUNT <= 2:
        found = prmt(words[FIRST], words[FIRST + COUNT - 1], selector, ASM)
    else:
        HALF: tl.constexpr = COUNT // 2
        low = _found(selector, choices, words, FIRST, HALF, DEPTH - 1, ASM)
        high = _found(selector, choices, words, FIRST + HALF, HALF, DEPTH - 1, ASM)
        found = prmt(low, high, choices[DEPTH - 1], ASM)
    return found


@triton.jit
def levels8(
    own, flip, second, above, words, keep, BITS: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """Look up eight codes: two words of four levels each, a tuple.

    `own`, `flip`, `second`: a code in each nibble, from its lowest bit on, what its coded bit is
    changed by to become c1, in the same place, and c0. Other bits are of no account. `above`: the
    point's bits of the upper plane, from the lowest bit of each nibble on. `keep`: the selector
    that keeps a word as it is, twice. `ASM`: whether the device knows PTX.
    """
    flip = flip & 0x11111111
    if BITS == 1:
        selector = ((own ^ flip) & 0x11111111) | ((second << 1) & 0x22222222)
        choices = ()
    elif BITS <= 3:
        selector = ((own ^ flip) & 0x33333333) | ((second << 2) & 0x44444444)
        choices = (_chosen(above << 2, keep),)
    else:
        selector = (own ^ flip) & 0x77777777
        choices = (
            _chosen(second << 2, keep), _chosen(own >> 1, keep),
            _chosen(above << 2, keep), _chosen(above << 1, keep),
        )  # fmt: skip
    COUNT: tl.constexpr = words_of(BITS)
    DEPTH: tl.constexpr = max(BITS - 2, 0) if BITS > 3 else BITS // 3
    lower = _found(selector, choices, words, 0, COUNT, DEPTH, ASM)
    upper = ()
    for i in tl.static_range(len(choices)):
        upper += (choices[i] >> 16,)
    return lower, _found(selector >> 16, upper, words, 0, COUNT, DEPTH, ASM)


@triton.jit
def spread(above, STEP: tl.constexpr):
    """Put the upper half of a byte's STEP * 2 lowest bits into its upper nibble."""
    return (above & 0x0F0F0F0F) | ((above << (4 - STEP)) & -0x0F0F0F10)


@triton.constexpr_function
def _shape(given, *last):
    return (*given, *last)


@triton.jit
def stacked(items, FIRST: tl.constexpr, COUNT: tl.constexpr, STEP: tl.constexpr = 1):
    """Put COUNT tensors of a tuple, from FIRST on in steps of STEP, in a new last axis."""
    if COUNT == 1:
        x = tl.expand_dims(items[FIRST], len(items[FIRST].shape))
    else:
        HALF: tl.constexpr = COUNT // 2
        even = stacked(items, FIRST, HALF, 2 * STEP)
        odd = stacked(items, FIRST + STEP, HALF, 2 * STEP)
        x = tl.join(even, odd).reshape(_shape(items[FIRST].shape, COUNT))
    return x


@triton.jit
def apart(x, COUNT: tl.constexpr):
    """Undo `stacked`: a tuple of COUNT tensors."""
    if COUNT == 1:
        items = (x.reshape(x.shape[:-1]),)
    else:
        even, odd = tl.split(x.reshape(_shape(x.shape[:-1], COUNT // 2, 2)))
        evens, odds = apart(even, COUNT // 2), apart(odd, COUNT // 2)
        items = ()
        for i in tl.static_range(COUNT // 2):
            items += (evens[i], odds[i])
    return items
