"""V's codes of trellises as the left operand of integer products; see `tiles` for the order.

A code's level needs the coded bits of channels before it, at the same place of their words. So a
thread has up to 16 channels, one after the other; of those before them, the four that another
thread has come from there.

Axes of V's words are `[S, O, 8, U, Q, RUN]`: S, U, Q as of `tiles`, O times eight groups of
threads, channels of one of them.
"""

import triton
import triton.language as tl

from kvpact.kernels.triton.digits.levels import bytes_of, order_of_k, row_of
from kvpact.kernels.triton.digits.tiles import grouped, tiles_together
from kvpact.kernels.triton.forms import SlotForm
from kvpact.kernels.triton.trellis.levels import (
    BY_2,
    BY_2_HALF,
    BY_4_HALF,
    KEEP,
    apart,
    block_table,
    first_word,
    levels8,
    spread,
    stacked,
    words_of,
)

_AXIS = tl.constexpr(3)
_RANK = tl.constexpr(5)


@triton.constexpr_function
def token_order(form: SlotForm) -> int:
    """Return the order of tokens, as of `token_places`: 4, or 2 where two tiles share threads."""
    return 4 if form.steps[0].low.width == 4 else 2


@triton.constexpr_function
def run_of(form: SlotForm) -> int:
    """Return the channels of a thread, one after the other."""
    return min(form.dim // 8, 16)


@triton.jit
def _load(tiles, live, ROW: tl.constexpr, DIVISOR: tl.constexpr, FORM: tl.constexpr):
    """Load row ROW + thread // DIVISOR of V's words for the threads of a tile."""
    VBITS: tl.constexpr = token_order(FORM)
    Q: tl.constexpr = 4 // tiles_together(VBITS)
    ROWS: tl.constexpr = Q // DIVISOR
    RUN: tl.constexpr = run_of(FORM)
    O: tl.constexpr = FORM.dim // (8 * RUN)  # noqa: E741
    S: tl.constexpr = tiles.shape[0] // tiles_together(VBITS)
    base = grouped(tiles, VBITS)[:, None, None, :, None, None, None, None]
    base = tl.multiple_of(base, [16, 16, 16, 16, 16, 16, 16, 16])
    seen = grouped(live, VBITS)[:, None, None, :, None, None, None, None]
    group = tl.arange(0, O)[:, None] * 8 + tl.arange(0, 8)[None, :]
    channel = tl.arange(0, RUN // 4)[:, None] * 4 + tl.arange(0, 4)[None, :]
    at = group[None, :, :, None, None, None, None, None] * RUN
    at = at + ((ROW + tl.arange(0, ROWS)) * FORM.dim)[None, None, None, None, :, None, None, None]
    at = at + channel[None, None, None, None, None, None, :, :]
    x = tl.load(base + at, mask=seen, other=0)
    if DIVISOR > 1:
        x = tl.broadcast_to(x, (S, O, 8, 4 // Q, ROWS, DIVISOR, RUN // 4, 4))
    return x.reshape(S, O, 8, 4, RUN)


@triton.jit
def _before(x, FORM: tl.constexpr):
    """Return the four channels before the first one of each thread, `[S, O, 8, 4, 4]`."""
    RUN: tl.constexpr = run_of(FORM)
    S: tl.constexpr = x.shape[0]
    COUNT: tl.constexpr = FORM.dim // RUN
    last = apart(x.reshape(S, COUNT, 4, RUN // 4, 4).permute(0, 1, 2, 4, 3), RUN // 4)
    group = ((tl.arange(0, COUNT) + COUNT - 1) % COUNT)[None, :, None, None]
    found = tl.gather(last[RUN // 4 - 1], tl.broadcast_to(group, (S, COUNT, 4, 4)), 1)
    return found.reshape(S, COUNT // 8, 8, 4, 4)


@triton.jit
def value_levels(
    tiles, live, TABLE, FORM: tl.constexpr, KW: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """Return the levels of V, int8 `[channels, N]`; parameters as of `key_levels`.

    Channels `(8 o + g) * run_of + c` stand in the order o, c, g; tokens in that of
    `trellis_weights`.
    """
    BLOCK: tl.constexpr = FORM.steps[0]
    WIDTH: tl.constexpr = BLOCK.low.width
    RUN: tl.constexpr = run_of(FORM)
    keep = row_of(TABLE, KEEP, _AXIS, _RANK)
    table = block_table(TABLE, first_word(FORM, 0), words_of(BLOCK.bits), _AXIS, _RANK)
    half = row_of(TABLE, BY_2_HALF, _AXIS, _RANK)
    own = _load(tiles, live, BLOCK.low.row, 2 if WIDTH == 1 else 1, FORM)
    words = apart(_before(own, FORM), 4) + apart(own, RUN)
    flip = stacked(words, 3, RUN) ^ stacked(words, 4 - BLOCK.memory, RUN)
    second, above = stacked(words, 2, RUN), own
    if WIDTH == 1:
        own, second, flip = own >> half, second >> half, flip >> half
    elif WIDTH == 2 and BLOCK.high.width > 0:
        above = _load(tiles, live, BLOCK.high.row, 2, FORM) >> half
    elif BLOCK.high.width == 1:
        above = _load(tiles, live, BLOCK.high.row, 4, FORM)
        above = spread(above >> row_of(TABLE, BY_2, _AXIS, _RANK), 1)
    elif BLOCK.high.width == 2:
        above = _load(tiles, live, BLOCK.high.row, 2, FORM)
        above = spread(above >> row_of(TABLE, BY_4_HALF, _AXIS, _RANK), 2)
    EIGHTS: tl.constexpr = 1 if WIDTH == 4 else 2
    found = ()
    for q in tl.static_range(EIGHTS):
        found += levels8(
            own >> (WIDTH * q), flip >> (WIDTH * q), second >> (WIDTH * q), above >> q, table,
            keep, BLOCK.bits, ASM,
        )  # fmt: skip
    x = bytes_of(stacked(found, 0, 2 * EIGHTS))
    x = x.reshape(x.shape[0], x.shape[1], 8, 4, RUN, EIGHTS, 2, 2, 2)
    # O c g | S, eight, half, t, high, low bit of the byte
    x = x.permute(order_of_k(KW, (1, 4, 2, 0, 5, 6, 3, 8, 7)))
    return x.reshape(FORM.dim, tiles.shape[0] * 32)


@triton.jit
def channels_of_values(FORM: tl.constexpr):
    """Return the channel of each row of `value_levels`, `[channels]`."""
    RUN: tl.constexpr = run_of(FORM)
    d = tl.arange(0, FORM.dim)
    return d // (8 * RUN) * (8 * RUN) + d % 8 * RUN + d // 8 % RUN


@triton.jit
def trellis_weights(pair, FORM: tl.constexpr, KW: tl.constexpr):
    """Put digits `[N, M]` from the order of the scores into that of `value_levels`' columns."""
    N: tl.constexpr = pair.shape[0]
    M: tl.constexpr = pair.shape[1]
    if token_order(FORM) == 4:
        # j1 j0 t r: token 8 t + 4 r + 2 j1 + j0
        x = pair.reshape(N // 32, 2, 2, 4, 2, M)
        x = x.permute(order_of_k(KW, (0, 1, 3, 2, 4, 5), 1))
    else:
        # x j1 j0 u r1 r0: token 16 r1 + 8 r0 + 4 x + 2 j1 + j0 of tile u
        x = pair.reshape(N // 64, 2, 2, 2, 4, 2, M)
        x = x.permute(order_of_k(KW, (0, 5, 1, 4, 2, 3, 6), 1))
    return x.reshape(N, M)
