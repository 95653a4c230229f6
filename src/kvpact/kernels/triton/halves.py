"""Operands of 16 bits: numbers of 8 bits as fp16, queries and weights as sums of two fp16 numbers.

Slots hold 32 tokens of a channel side by side, a word four of them. K's operand, `[tokens,
channels]`, takes bytes of two channels for a register, V's, `[channels, tokens]`, two bytes of a
word. Products are exact, sums those of tensor cores; what is rounded are queries and weights, to 22
bits. NaN, which no slot holds, would become a number.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

from kvpact.kernels.triton.levels import down, prmt

if TYPE_CHECKING:
    from kvpact.kernels.triton.forms import SlotForm


@triton.constexpr_function
def of_halves(form: SlotForm) -> bool:
    """Return whether products are those of fp16 numbers."""
    return form.kind in ("e4m3", "e5m2")


@triton.constexpr_function
def order_of(form: SlotForm) -> int:
    """Return the bits of V's codes in whose order of tokens scores are."""
    return 2 if of_halves(form) else form.bits


@triton.constexpr_function
def tile_words(form: SlotForm) -> int:
    """Return the words of 32 bits of a tile's codes."""
    if form.order == "number":
        return form.dim * 8
    return form.words * (32 if form.order == "token" else form.dim)


@triton.jit
def halves(word, FORM: tl.constexpr, ASM: tl.constexpr):
    """Return bytes 1 and 3 of words as numbers, fp16 `[…, 2]`: e4m3 over 256."""
    if FORM.kind == "e4m3":
        # An exponent of four bits in the place of one of five; the bias is eight less.
        bits = (down(word, 1, ASM) & 0x3F803F80) | (word & -0x7FFF8000)
    else:
        bits = word & -0x00FF0100
    low = bits.to(tl.int16).to(tl.float16, bitcast=True)
    high = (bits >> 16).to(tl.int16).to(tl.float16, bitcast=True)
    return tl.join(low, high)


@triton.jit
def _words(
    tiles, live, FIRST: tl.constexpr, EACH: tl.constexpr, C: tl.constexpr, DIM: tl.constexpr
):
    """Load words `[NT, C, 8]` of channels: of each 8 those from FIRST on, EACH of them."""
    base = tl.multiple_of(tiles[:, None, None], [16, 16, 16])
    c = tl.arange(0, C)
    channel = c // EACH * 8 + c % EACH + FIRST
    seen = live[:, None, None]
    if C * 8 // EACH > DIM:
        seen = seen & (channel < DIM)[None, :, None]
    at = (channel * 8)[None, :, None] + tl.arange(0, 8)[None, None, :]
    return tl.load(base + at, mask=seen, other=0)


@triton.jit
def key_halves(
    tiles, live, C: tl.constexpr, FORM: tl.constexpr, KW: tl.constexpr, ASM: tl.constexpr
):
    """Load K's numbers: fp16 `[N, C]`, tokens in the order of V's 2 bits."""
    NT: tl.constexpr = tiles.shape[0]
    first = _words(tiles, live, 0, 4, C // 2, FORM.dim)
    second = _words(tiles, live, 4, 4, C // 2, FORM.dim)
    x0 = prmt(first, second, tl.full(first.shape, 0x4400, tl.int32), ASM)
    x1 = prmt(first, second, tl.full(first.shape, 0x5511, tl.int32), ASM)
    x2 = prmt(first, second, tl.full(first.shape, 0x6622, tl.int32), ASM)
    x3 = prmt(first, second, tl.full(first.shape, 0x7733, tl.int32), ASM)
    low = tl.join(halves(x0, FORM, ASM), halves(x1, FORM, ASM))
    x = tl.join(low, tl.join(halves(x2, FORM, ASM), halves(x3, FORM, ASM)))
    # s u | a h t | r x | e j0 j1
    x = x.reshape(NT // 2, 2, C // 16, 2, 4, 4, 2, 2, 2, 2)
    if KW == 4:
        x = x.permute(0, 6, 9, 8, 1, 5, 2, 3, 4, 7)
    else:
        x = x.permute(0, 6, 9, 8, 1, 5, 2, 4, 3, 7)
    return x.reshape(NT * 32, C)


@triton.jit
def key_channels(C: tl.constexpr, KW: tl.constexpr):
    """Return the channel at each place k of `key_halves`, `[C]`."""
    k = tl.arange(0, C)
    if KW == 4:
        return k // 8 * 8 + (k % 2) * 4 + k // 2 % 4
    else:
        return k // 16 * 16 + k // 2 % 2 * 8 + (k % 2) * 4 + k // 4 % 4


@triton.jit
def value_halves(
    tiles, live, D: tl.constexpr, FORM: tl.constexpr, KW: tl.constexpr, ASM: tl.constexpr
):
    """Load V's numbers: fp16 `[D, N]`, channels in their order."""
    NT: tl.constexpr = tiles.shape[0]
    words = _words(tiles, live, 0, 8, D, FORM.dim)
    even, odd = halves(words << 8, FORM, ASM), halves(words, FORM, ASM)
    # s d | t w | e o
    x = tl.join(even, odd).reshape(NT, D, 4, 2, 2, 2)
    x = x.permute(1, 0, 3, 5, 2, 4) if KW == 4 else x.permute(1, 0, 3, 2, 5, 4)
    return x.reshape(D, NT * 32)


@triton.jit
def in_two(x):
    """Return numbers `[N, G]` up to 1 as sums of two: fp16 `[N, 2 G]`."""
    high = x.to(tl.float16)
    low = (x - high.to(tl.float32)).to(tl.float16)
    return tl.join(high, low).reshape(x.shape[0], x.shape[1] * 2)


@triton.jit
def weight_halves(weights, KW: tl.constexpr):
    """Put weights `[N, G]` into the order of `value_halves`' columns: fp16 `[N, 2 G]`."""
    N: tl.constexpr = weights.shape[0]
    M: tl.constexpr = weights.shape[1] * 2
    x = in_two(weights).reshape(N // 64, 2, 2, 2, 2, 4, M)  # s x j1 j0 u r
    x = x.permute(0, 4, 1, 3, 5, 2, 6) if KW == 4 else x.permute(0, 4, 1, 5, 3, 2, 6)
    return x.reshape(N, M)


@triton.jit
def summed(x):
    """Return the sums fp32 `[R, G]` of the products with both numbers, `[R, 2 G]`."""
    high, low = tl.split(x.reshape(x.shape[0], x.shape[1] // 2, 2))
    return high + low
