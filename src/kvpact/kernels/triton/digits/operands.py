"""Operands of integer products: K `[tokens, channels]`, V `[channels, tokens]`, weights as digits.

Within a product the order of k is KW's: Triton before 3.8 has eight bytes side by side in a thread
where later versions have four. The queries' order (`key_order`) and the weights' follow it.
"""

import triton
import triton.language as tl

from kvpact.kernels.triton.digits.levels import (
    bytes_of,
    codes2,
    codes4,
    levels2,
    levels3,
    levels4,
    order_of_k,
    row_of,
    signed4,
)
from kvpact.kernels.triton.digits.tiles import field_words, load_keys, load_values, tiles_together
from kvpact.kernels.triton.forms import SlotForm


@triton.constexpr_function
def level_worth(form: SlotForm) -> float:
    """Return what a level that a kernel multiplies is worth: 4-bit numbers are 16 times larger."""
    return form.unit / 16 if form.bits == 4 and form.signed else form.unit


@triton.constexpr_function
def in_bytes(form: SlotForm) -> bool:
    """Return whether bytes of levels are made without a table, of 2 and 4 bits."""
    return form.kind == "linear" or (form.signed and form.bits == 4)


@triton.constexpr_function
def key_width(form: SlotForm) -> int:
    """Return the channels of one product with K: those of a group, or all, filled up."""
    if form.groups > 1:
        return form.channels
    return max(form.padded, {2: 64, 3: 128}.get(form.bits, 32))


@triton.constexpr_function
def value_width(form: SlotForm) -> int:
    """Return the channels of one product with V."""
    return form.channels if form.groups > 1 else max(form.padded, 32)


@triton.jit
def _levels_of_4(words, t0, TABLE, FORM: tl.constexpr, AXIS: tl.constexpr, ASM: tl.constexpr):
    """Look up codes of 4 bits, with or without a table."""
    if FORM.signed:
        x = signed4(words, t0, ASM)
    elif in_bytes(FORM):
        x = codes4(words, ASM)
    else:
        t1, t2 = row_of(TABLE, 1, AXIS, AXIS + 2), row_of(TABLE, 2, AXIS, AXIS + 2)
        x = levels4(words, t0, t1, t2, row_of(TABLE, 3, AXIS, AXIS + 2), ASM)
    return x


@triton.jit
def key_operand(
    tiles, live, TABLE, GROUP: tl.constexpr, FORM: tl.constexpr, VBITS: tl.constexpr,
    KW: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """Load and look up K's codes of a group of channels: int8 `[N, key_width]`."""
    BITS: tl.constexpr = FORM.bits
    C: tl.constexpr = key_width(FORM)
    N: tl.constexpr = tiles.shape[0] * 32
    W: tl.constexpr = FORM.words
    t0 = row_of(TABLE, 0, 5, 7)
    if BITS == 3:
        low: tl.constexpr = field_words(FORM, 2)
        high: tl.constexpr = field_words(FORM, 1)
        even = load_keys(tiles, live, 0, 2, C // 32, (low + 1) // 2, W, VBITS)
        odd = load_keys(tiles, live, 1, 2, C // 32, low // 2, W, VBITS)
        third = load_keys(tiles, live, low, 1, C // 32, high, W, VBITS)
        x = levels3(even, odd, third, t0, row_of(TABLE, 1, 5, 7), ASM)
        x = x.permute(order_of_k(KW, (0, 2, 6, 3, 4, 1, 11, 10, 9, 5, 8, 7)))
    else:
        COUNT: tl.constexpr = C * BITS // 32
        words = load_keys(tiles, live, GROUP * COUNT, 1, COUNT, W - GROUP * COUNT, W, VBITS)
        if BITS == 2:
            # From the table in any case: queries get their digits where the codes of eight channels
            # that follow each other are in one thread.
            x = levels2(words, t0, ASM)
            x = x.permute(order_of_k(KW, (0, 2, 6, 3, 4, 1, 10, 9, 5, 8, 7)))
        elif BITS == 8:
            # Two words of a thread make one step of the product.
            y = words ^ t0
            S: tl.constexpr = y.shape[0]
            A: tl.constexpr = y.shape[1] // 2
            x = bytes_of(y.reshape(S, A, 2, y.shape[2], y.shape[3], y.shape[4], 4, y.shape[6]))
            x = x.permute(order_of_k(KW, (0, 3, 7, 4, 5, 1, 2, 6, 9, 8)))
        else:
            x = _levels_of_4(words, t0, TABLE, FORM, 5, ASM)
            x = x.permute(order_of_k(KW, (0, 2, 6, 3, 4, 1, 9, 5, 8, 7)))
    return x.reshape(N, C)


@triton.jit
def value_operand(
    tiles, live, TABLE, GROUP: tl.constexpr, FORM: tl.constexpr, KW: tl.constexpr,
    ASM: tl.constexpr,
):  # fmt: skip
    """Look up V's codes of a group: int8 `[value_width, N]`, channel 32 i + 4 g + j at i, j, g."""
    BITS: tl.constexpr = FORM.bits
    C: tl.constexpr = value_width(FORM)
    P: tl.constexpr = C // 32
    D: tl.constexpr = FORM.dim
    N: tl.constexpr = tiles.shape[0] * 32
    S: tl.constexpr = tiles.shape[0] // tiles_together(BITS)
    t0 = row_of(TABLE, 0, 4, 6)
    if BITS == 3:
        low = load_values(tiles, live, 0, 1, 1, GROUP * C, C, D, BITS).reshape(S, 1, P, 8, 4, 4)
        high = load_values(tiles, live, 1, 1, 1, GROUP * C, C, D, BITS).reshape(S, 1, P, 8, 4, 4)
        third = load_values(tiles, live, 2, 1, 1, GROUP * C, C, D, BITS).reshape(S, 1, P, 8, 4, 4)
        x = levels3(low, high, third, t0, row_of(TABLE, 1, 4, 6), ASM)
        x = x.permute(order_of_k(KW, (2, 5, 3, 0, 1, 10, 9, 8, 4, 7, 6)))
    elif BITS == 8:
        words = load_values(tiles, live, 0, 2, 2, GROUP * C, C, D, BITS)
        x = bytes_of(words.reshape(S, 2, P, 8, 4, 4) ^ t0)
        x = x.permute(order_of_k(KW, (2, 5, 3, 0, 1, 4, 7, 6)))
    else:
        words = load_values(tiles, live, 0, 1, 1, GROUP * C, C, D, BITS)
        words = words.reshape(S, 1, P, 8, 4, 4)
        if BITS == 2:
            if in_bytes(FORM):
                x = codes2(words, ASM)
            else:
                x = levels2(words, t0, ASM)
            x = x.permute(order_of_k(KW, (2, 5, 3, 0, 1, 9, 8, 4, 7, 6)))
        else:
            x = _levels_of_4(words, t0, TABLE, FORM, 4, ASM)
            x = x.permute(order_of_k(KW, (2, 5, 3, 0, 1, 8, 4, 7, 6)))
    return x.reshape(C, N)


@triton.jit
def weight_operand(pair, FORM: tl.constexpr, KW: tl.constexpr):
    """Put digits `[N, M]` from the order of the scores into that of `value_operand`'s columns."""
    BITS: tl.constexpr = FORM.bits
    N: tl.constexpr = pair.shape[0]
    M: tl.constexpr = pair.shape[1]
    if BITS == 4 or BITS == 8:
        x = pair.reshape(N // 32, 2, 2, 4, 2, M)  # j1 j0 t r: token 8 t + 4 r + 2 j1 + j0
        if BITS == 4 and in_bytes(FORM):
            x = x.permute(order_of_k(KW, (0, 2, 3, 4, 1, 5), 1))
        else:
            x = x.permute(order_of_k(KW, (0, 4, 3, 1, 2, 5), 1))
    elif BITS == 2:
        x = pair.reshape(N // 64, 2, 2, 2, 4, 2, M)  # i2 i1 i0 t i3
        if in_bytes(FORM):
            x = x.permute(order_of_k(KW, (0, 3, 2, 4, 5, 1, 6), 1))
        else:
            x = x.permute(order_of_k(KW, (0, 5, 3, 4, 1, 2, 6), 1))
    else:
        x = pair.reshape(N // 128, 2, 2, 2, 2, 4, 2, M)  # i3 i2 i1 i0 t i4
        x = x.permute(order_of_k(KW, (0, 3, 4, 1, 5, 6, 2, 7), 1))
    return x.reshape(N, M)


@triton.constexpr_function
def channel_places(form: SlotForm, kw: int) -> tuple[int, ...]:
    """Return the channel at each place k of `key_operand`, counted from the group's first."""
    width, places = key_width(form), []
    for place in range(width):
        k = place
        if kw == 8:  # (…, t, x, 4 bytes) in place of (…, x, t, 4 bytes)
            k = (place // 32) * 32 + (place // 4 % 2) * 16 + (place // 8 % 4) * 4 + place % 4
        b = [k >> i & 1 for i in range(8)]
        t = k >> 2 & 3
        if form.bits == 8:
            channel = k
        elif form.bits == 4 and in_bytes(form):
            channel = (k // 32) * 32 + 8 * t + 4 * b[1] + 2 * b[0] + b[4]
        elif form.bits == 4:
            channel = (k // 32) * 32 + 8 * t + 4 * b[4] + 2 * b[1] + b[0]
        elif form.bits == 2:
            channel = (k // 64) * 64 + 16 * t + 8 * b[5] + 4 * b[1] + 2 * b[0] + b[4]
        else:
            channel = (k // 128) * 128 + 32 * t + 16 * b[1] + 8 * b[4] + 4 * b[0] + 2 * b[6] + b[5]
        places.append(channel)
    return tuple(places)
