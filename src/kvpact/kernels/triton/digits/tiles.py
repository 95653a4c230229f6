"""Packed slots as operands of tensor-core products: a thread loads the words that it multiplies.

`tl.dot` has its left operand in an order of its own: eight groups of four threads make its rows,
the four threads of a group share a row. The order of channels, and that of tokens, is free as long
as both sides of a product have the same one. Here it is such that a thread's share of an operand
are whole words of slots, in vectors of 16 bytes. Between load and product the compiler then finds
nothing but what is done to each element, and views (reshape, permute, join): nothing passes through
shared memory once it is decoded.

Axes of K's words are `[S, A, X, U, R, 4, J]`, of V's `[S, Y, I, 8, U, Q, 4]`:

====  ==============================================================================
S, U  groups of tiles, and the tiles of a group: so many as have four words of V in
      each channel, one for each of four threads
A, 4  four words of a token, one for each of the four threads of a row
U, R  groups of threads: `U * R = 8`
X, J  tokens of a group of threads in a tile; J = 4 of them are a vector
I, 8  channels 32 I + 4 * (0 … 7) + (0 … 3), the last of them a vector
Y, Q  words of a thread, and threads that share a tile: `U * Q = 4`
====  ==============================================================================

Scores and weights stand in the order of tokens S, X, J, U, R.
"""

import triton
import triton.language as tl

from kvpact.kernels.triton.columns import of_row
from kvpact.kernels.triton.forms import SlotForm
from kvpact.kernels.triton.slots import pointer_to

TOGETHER = {2: 2, 3: 4, 4: 1, 8: 1}
"""Tiles of a group (U), by V's bits: the widths of V for which there is an order of tokens."""


@triton.constexpr_function
def tiles_together(bits: int) -> int:
    """Return the tiles of a group, U."""
    return TOGETHER[bits]


@triton.constexpr_function
def field_words(form: SlotForm, width: int) -> int:
    """Return the words of a token's codes in a plane of so many bits."""
    return -(-form.dim * width // 32)


@triton.jit
def grouped(x, VBITS: tl.constexpr):
    """Split the tiles of a block, `[NT]`, into `[S, U]`."""
    U: tl.constexpr = tiles_together(VBITS)
    return x.reshape(x.shape[0] // U, U)


@triton.jit
def token_places(VBITS: tl.constexpr, HALF):
    """Return where tokens stand in a tile, `[X, R, J]`; `HALF` is the step from token 15 to 16."""
    if VBITS == 2:
        x, r = tl.arange(0, 2), tl.arange(0, 4)
        place = x[:, None] * 4 + ((r >> 1) * HALF + (r & 1) * 8)[None, :]
    elif VBITS == 3:
        x, r = tl.arange(0, 4), tl.arange(0, 2)
        place = x[:, None] * 4 + (r * HALF)[None, :]
    else:
        x, r = tl.arange(0, 1), tl.arange(0, 8)
        place = x[:, None] + ((r >> 2) * HALF + (r & 3) * 4)[None, :]
    return place[:, :, None] + tl.arange(0, 4)[None, None, :]


@triton.jit
def load_keys(
    tiles, live, FIRST, STEP: tl.constexpr, COUNT: tl.constexpr, REAL: tl.constexpr,
    WORDS: tl.constexpr, VBITS: tl.constexpr,
):  # fmt: skip
    """Load some words of each token of K, `[S, COUNT / 4, X, U, R, 4, J]`.

    `tiles`: the codes of each tile, `[2, WORDS, 16]`. `FIRST`, `STEP`, `COUNT`, `REAL`: words
    FIRST, FIRST + STEP, …; those from REAL on are zero.
    """
    # The hint stands after the reshape: older versions lose it there, and would copy 4 bytes.
    base = grouped(tiles, VBITS)[:, None, None, :, None, None, None]
    base = tl.multiple_of(base, [16, 16, 16, 16, 16, 16, 16])
    seen = grouped(live, VBITS)[:, None, None, :, None, None, None]
    index = tl.arange(0, COUNT // 4)[:, None] * 4 + tl.arange(0, 4)[None, :]
    if REAL < COUNT:
        seen = seen & (index < REAL)[None, :, None, None, None, :, None]
    word = index * STEP + FIRST
    place = token_places(VBITS, WORDS * 16)[None, None, :, None, :, None, :]
    at = (word * 16)[None, :, None, None, None, :, None] + place
    return tl.load(base + at, mask=seen, other=0)


@triton.jit
def load_values(
    tiles, live, ROW, ROWSTEP: tl.constexpr, Y: tl.constexpr, FIRST: tl.constexpr,
    WIDTH: tl.constexpr, DIM: tl.constexpr, VBITS: tl.constexpr,
):  # fmt: skip
    """Load rows of V's words, one for each thread of a row: `[S, Y, WIDTH / 32, 8, U, Q, 4]`.

    `tiles`: the codes of each tile, `[VBITS, DIM]`. `ROW`, `ROWSTEP`, `Y`: the first row, the step
    to the next thread's, and how many rows a thread takes. `FIRST`, `WIDTH`: channels; those from
    DIM on are zero.
    """
    Q: tl.constexpr = 4 // tiles_together(VBITS)
    base = grouped(tiles, VBITS)[:, None, None, None, :, None, None]
    base = tl.multiple_of(base, [16, 16, 16, 16, 16, 16, 16])
    seen = grouped(live, VBITS)[:, None, None, None, :, None, None]
    quad = tl.arange(0, WIDTH // 32)[:, None] * 32 + tl.arange(0, 8)[None, :] * 4 + FIRST
    if FIRST + WIDTH > DIM:
        seen = seen & (quad < DIM)[None, None, :, :, None, None, None]
    row = (tl.arange(0, Q) * ROWSTEP + ROW) * DIM
    y = tl.arange(0, Y) * DIM
    channel = quad[:, :, None] + tl.arange(0, 4)[None, None, :]
    at = row[None, None, None, None, None, :, None] + y[None, :, None, None, None, None, None]
    at = at + channel[None, None, :, :, None, None, :]
    return tl.load(base + at, mask=seen, other=0)


@triton.jit
def load_per_token(tiles, live, FIRST, VBITS: tl.constexpr):
    """Load a number per token, `[N]` in the order of the scores; `FIRST` elements into a tile."""
    base = grouped(tiles, VBITS)[:, None, :, None, None]
    base = tl.multiple_of(base, [16, 16, 16, 16, 16])
    seen = grouped(live, VBITS)[:, None, :, None, None]
    at = FIRST + token_places(VBITS, 16)
    x = tl.load(base + at[None, :, None, :, :], mask=seen, other=0.0)
    return x.permute(0, 1, 4, 2, 3).reshape(tiles.shape[0] * 32)


@triton.jit
def positions(first_tile, NT: tl.constexpr, VBITS: tl.constexpr):
    """Return the positions of a block's tokens, `[N]`, in the order of the scores."""
    tile = grouped((first_tile + tl.arange(0, NT)) * 32, VBITS)[:, None, :, None, None]
    token = tile + token_places(VBITS, 16)[None, :, None, :, :]
    return token.permute(0, 1, 4, 2, 3).reshape(NT * 32)


@triton.jit
def segments_of(ROWS, row, head, SLOTS: tl.constexpr, FIELD: tl.constexpr):
    """Return where addresses of a field's segments stand, and the bytes from head 0 to a head.

    `ROWS`, `SLOTS`: the table of rows, and the place there of what tells of K's slots, or V's.
    """
    table = of_row(ROWS, row, SLOTS).to(tl.pointer_type(tl.int64))
    heads = of_row(ROWS, row, SLOTS + 1).to(tl.pointer_type(tl.int64))
    line = FIELD * of_row(ROWS, row, SLOTS + 3) + of_row(ROWS, row, SLOTS + 2)
    return table + line * of_row(ROWS, row, SLOTS + 4), head * tl.load(heads + FIELD)


@triton.jit
def tiles_at(SEGMENTS, head_bytes, segment, inside, STEP: tl.constexpr, TYPE: tl.constexpr):
    """Return pointers `[NT]` to a field of tiles.

    `segment`, `inside`: segment of each tile (or of all), and the number of the tile in it;
    `TYPE`: of the field's numbers, one of `forms.NUMBERS`.
    """
    first = (tl.load(SEGMENTS + segment) + head_bytes).to(pointer_to(TYPE))
    return tl.multiple_of(first + inside * STEP, [16])


@triton.jit
def _field(where, SLOTS: tl.constexpr, FORM: tl.constexpr, NAME: tl.constexpr, STEP: tl.constexpr):
    """Return pointers to a field of tiles, so many numbers of which belong to each."""
    ROWS, row, head, segment, inside = where
    at, head_bytes = segments_of(ROWS, row, head, SLOTS, FORM.index_of(NAME))
    return tiles_at(at, head_bytes, segment, inside, STEP, FORM.type_of(NAME))


@triton.jit
def fields_of(where, SLOTS: tl.constexpr, FORM: tl.constexpr):
    """Return pointers `[NT]` to codes, scales and zeros of tiles; codes where there are no zeros.

    `where`: the table of rows, row, head, the segment of each tile (or of all), and the number of
    the tile in it.
    """
    WORDS: tl.constexpr = FORM.words * (32 if FORM.order == "token" else FORM.dim)
    codes = _field(where, SLOTS, FORM, "codes", WORDS)
    scale = _field(where, SLOTS, FORM, "scale", FORM.groups * 32)
    zero = codes
    if FORM.has("zero"):
        zero = _field(where, SLOTS, FORM, "zero", FORM.groups * 32)
    return codes, scale, zero
