"""Words of codes to levels of 8 bits in registers: tables of 16 levels in four words, or no table.

A table is looked up by `prmt`, which picks four of eight bytes by the nibbles of a selector. Each
of these is one line of assembly (`ASM`) with a body in plain Triton next to it, for the interpreter
and for other devices.

The last axes of what is returned are bits of an item's number, as each function says.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kvpact.kernels.triton.transforms import rotated


@triton.constexpr_function
def order_of_k(kw, axes, after=0):
    """Return the axes of a product's k, and `after` it others, in its order.

    Given is that of four bytes side by side, which the last two axes number; with eight of them
    the two before change places.
    """
    at = len(axes) - after - 4
    return axes if kw == 4 else (*axes[:at], axes[at + 1], axes[at], *axes[at + 2 :])


@triton.jit
def prmt(low, high, selector, ASM: tl.constexpr):
    """Return four bytes: byte i is byte `selector >> 4i & 7` of the eight of (low, high).

    Bit 3 of each nibble of the selector has to be 0.
    """
    if ASM:
        return tl.inline_asm_elementwise(
            "prmt.b32 $0, $1, $2, $3;", "=r,r,r,r", [low, high, selector], tl.int32, True, 1
        )
    else:
        byte = tl.arange(0, 4)
        nibble = tl.expand_dims(selector, -1) >> (byte << 2) & 7
        word = tl.where(nibble < 4, tl.expand_dims(low, -1), tl.expand_dims(high, -1))
        # The bytes do not overlap.
        return tl.sum((word >> ((nibble & 3) << 3) & 0xFF) << (byte << 3), -1)


@triton.jit
def top_bits(word, UPPER: tl.constexpr, ASM: tl.constexpr):
    """Return bytes of ones where bit 3 of the lower, or upper, four nibbles of a word is set.

    The assembly asks for the sign (8 + i) of byte i of (word, word << 4).
    """
    shifted = word << 4
    if ASM and UPPER:
        return tl.inline_asm_elementwise(
            "prmt.b32 $0, $1, $2, 0xbfae;", "=r,r,r", [word, shifted], tl.int32, True, 1
        )
    elif ASM:
        return tl.inline_asm_elementwise(
            "prmt.b32 $0, $1, $2, 0x9d8c;", "=r,r,r", [word, shifted], tl.int32, True, 1
        )
    else:
        nibbles = word >> 16 if UPPER else word
        out = tl.zeros(word.shape, tl.int32)
        for i in tl.static_range(4):
            out |= (((nibbles >> (4 * i + 3)) & 1) * 0xFF) << (8 * i)
        return out


@triton.jit
def bytes_of(word):
    """Return the bytes of words, int8 `[…, y0, y1]`: byte 2 y1 + y0."""
    low = tl.join(word.to(tl.int8), (word >> 8).to(tl.int8))
    high = tl.join((word >> 16).to(tl.int8), (word >> 24).to(tl.int8))
    return tl.join(low, high)


@triton.jit
def levels4(word, t0, t1, t2, t3, ASM: tl.constexpr):
    """Look up 4-bit codes: `[…, i0, i1, i2]`, code 4 i2 + 2 i1 + i0 of the word."""
    lower = word & 0x77777777
    upper = lower >> 16
    m, n = top_bits(word, False, ASM), top_bits(word, True, ASM)
    first = (prmt(t0, t1, lower, ASM) & ~m) | (prmt(t2, t3, lower, ASM) & m)
    last = (prmt(t0, t1, upper, ASM) & ~n) | (prmt(t2, t3, upper, ASM) & n)
    return tl.join(bytes_of(first), bytes_of(last))


@triton.jit
def levels2(word, t0, ASM: tl.constexpr):
    """Look up 2-bit codes: `[…, i1, i2, i0, i3]`, code 8 i3 + 4 i2 + 2 i1 + i0 of the word."""
    even, odd = word & 0x33333333, (word >> 2) & 0x33333333
    first = tl.join(bytes_of(prmt(t0, t0, even, ASM)), bytes_of(prmt(t0, t0, odd, ASM)))
    last = tl.join(bytes_of(prmt(t0, t0, even >> 16, ASM)), bytes_of(prmt(t0, t0, odd >> 16, ASM)))
    return tl.join(first, last)


@triton.jit
def levels3(first, second, third, t0, t1, ASM: tl.constexpr):
    """Look up 3-bit codes, `[…, i2, i4, i3, i0, i1]` by their numbers' bits.

    `first`, `second`: the low two bits of 16 codes each; `third`: the third bit of all 32.
    """
    # Codes 0 to 3 of bytes 0 and 2 of both words, codes 4 to 7 (bytes 1 and 3), and third bits.
    x = prmt(first, second, tl.full(first.shape, 0x6240, tl.int32), ASM)
    y = prmt(first, second, tl.full(first.shape, 0x7351, tl.int32), ASM)
    z = prmt(third, third, tl.full(third.shape, 0x3120, tl.int32), ASM)
    # A nibble: two bits of code i (lower nibbles) or i + 4 (upper ones), then its third bit.
    n0 = (x & 0x03030303) | ((y << 4) & 0x30303030) | ((z << 2) & 0x44444444)
    n1 = ((x >> 2) & 0x03030303) | ((y << 2) & 0x30303030) | ((z << 1) & 0x44444444)
    n2 = ((x >> 4) & 0x03030303) | (y & 0x30303030) | (z & 0x44444444)
    n3 = ((x >> 6) & 0x03030303) | ((y >> 2) & 0x30303030) | ((z >> 1) & 0x44444444)
    low = tl.join(halves3(n0, t0, t1, ASM), halves3(n1, t0, t1, ASM))
    return tl.join(low, tl.join(halves3(n2, t0, t1, ASM), halves3(n3, t0, t1, ASM)))


@triton.jit
def halves3(nibbles, t0, t1, ASM: tl.constexpr):
    """Look up the lower and the upper four nibbles."""
    lower, upper = prmt(t0, t1, nibbles, ASM), prmt(t0, t1, nibbles >> 16, ASM)
    return tl.join(bytes_of(lower), bytes_of(upper))


@triton.jit
def signed4(word, flip, ASM: tl.constexpr):
    """Return 16 times each 4-bit number: `[…, y0, y1, i0]`, item 4 y1 + 2 y0 + i0 of the word.

    A number in the upper half of a byte is 16 times itself: all there is to do is to flip top bits
    and shift. The shift is assembly so that nobody moves it to each byte.
    """
    upper = word ^ flip
    if ASM:
        lower = tl.inline_asm_elementwise("shl.b32 $0, $1, 4;", "=r,r", [upper], tl.int32, True, 1)
    else:
        lower = upper << 4
    return tl.join(bytes_of(lower & -0x0F0F0F10), bytes_of(upper & -0x0F0F0F10))


@triton.constexpr_function
def _shift(count):
    return f"shr.u32 $0, $1, {count};"


@triton.jit
def down(word, COUNT: tl.constexpr, ASM: tl.constexpr):
    """Shift words to the right; by assembly, so that nobody moves it to each byte."""
    if ASM:
        return tl.inline_asm_elementwise(_shift(COUNT), "=r,r", [word], tl.int32, True, 1)
    else:
        return word >> COUNT


@triton.jit
def codes4(word, ASM: tl.constexpr):
    """Return 4-bit codes themselves: as `signed4`."""
    return tl.join(bytes_of(word & 0x0F0F0F0F), bytes_of(down(word, 4, ASM) & 0x0F0F0F0F))


@triton.jit
def codes2(word, ASM: tl.constexpr):
    """Return 2-bit codes themselves: `[…, i2, i3, i1, i0]`, 8 i3 + 4 i2 + 2 i1 + i0 of the word."""
    first = bytes_of(word & 0x03030303)
    second = bytes_of(down(word, 2, ASM) & 0x03030303)
    third = bytes_of(down(word, 4, ASM) & 0x03030303)
    fourth = bytes_of(down(word, 6, ASM) & 0x03030303)
    return tl.join(tl.join(first, third), tl.join(second, fourth))


@triton.jit
def row_of(TABLE, ROW: tl.constexpr, AXIS: tl.constexpr, RANK: tl.constexpr):
    """Load a row of a table: a number for each of the four threads of a row, which stand at AXIS.

    What has the same address for all threads, and what is a constant, is copied to another register
    before each use.
    """
    shape: tl.constexpr = (1,) * AXIS + (4,) + (1,) * (RANK - AXIS - 1)
    return tl.load(TABLE + ROW * 4 + tl.arange(0, 4)).reshape(shape)


MOST = tl.constexpr(32512.0)
"""127 * 256: what two digits of eight bits hold, the lower one with a sign."""
_WHOLE = tl.constexpr(12582912.0)  # 1.5 * 2**23: a sum with it has a whole number in its low bits


@triton.jit
def split_digits(x):
    """Return digits int8 `[…, 2]` of base 256 of numbers fp32 up to `MOST`, rounded."""
    n = (x + _WHOLE).to(tl.int32, bitcast=True)
    return tl.join(((n + 128) >> 8).to(tl.int8), n.to(tl.int8))


@triton.jit
def whole(x, BASE: tl.constexpr = 128):
    """Return the numbers fp32 `[R, G]` of two digits each, `[R, 2 G]` int32."""
    high, low = tl.split(x.reshape(x.shape[0], x.shape[1] // 2, 2))
    return (high * BASE + low).to(tl.float32)


@triton.jit(do_not_specialize=["q_row", "q_head", "q_token", "queries", "rows", "heads"])
def query_digits(
    Q, SIGNS, PLACES, DIGITS, UNITS, q_row, q_head, q_token, queries, rows, heads, worth,
    DIM: tl.constexpr, WIDTH: tl.constexpr, G: tl.constexpr, SIZE: tl.constexpr,
    SPAN: tl.constexpr, ROTATED: tl.constexpr, NUMBERS=None, logits=1.0,
):  # fmt: skip
    """Rotate and split the queries `[B, H_q, q_len, DIM]` of a KV head; grid `(heads, batch)`.

    `SIGNS`, `PLACES`: of the rotation; `[SPAN]` int32, where each channel's high digit goes.
    `DIGITS`, `UNITS`: int8 `[B, H_kv, SPAN / SIZE, G, 2, SIZE]` and fp32 `[B, H_kv, G]`, what a
    digit is worth. `queries`, `rows`, `heads`: of a head, of a KV head (`g * queries + i`), KV
    heads. `worth`: the factor of products with levels. `WIDTH`: channels, a power of two.
    `ROTATED`: whether K's slots are. `NUMBERS`, `logits`: where the rotated queries times `logits`
    go, fp32 `[B, H_kv, G, DIM]`; or None.
    """
    head, row = tl.program_id(0), tl.program_id(1)
    r, d = tl.arange(0, G), tl.arange(0, WIDTH)
    query_head = head * (rows // queries) + r // queries
    at = row.to(tl.int64) * q_row + query_head.to(tl.int64) * q_head
    at += (r % queries).to(tl.int64) * q_token
    there = (r < rows)[:, None] & (d < DIM)[None, :]
    x = tl.load(Q + at[:, None] + d[None, :], mask=there, other=0.0).to(tl.float32)
    if ROTATED:
        x = rotated(x, SIGNS, G, WIDTH, DIM)
    base = (row * heads + head).to(tl.int64)
    if NUMBERS is not None:
        at = NUMBERS + base * (G * DIM) + (r * DIM)[:, None] + d[None, :]
        tl.store(at, x * logits, mask=tl.broadcast_to((d < DIM)[None, :], at.shape))
    unit = tl.maximum(tl.max(tl.abs(x), 1), 1e-30) * (1.0 / 16256.0)
    n = tl.floor(x / unit[:, None] + 0.5).to(tl.int32)
    high = (n + 64) >> 7
    place = tl.load(PLACES + d, mask=d < SPAN, other=0)
    out = DIGITS + base * (2 * G * SPAN) + (r * (2 * SIZE))[:, None] + place[None, :]
    kept = tl.broadcast_to((d < SPAN)[None, :], out.shape)
    tl.store(out, high.to(tl.int8), mask=kept)
    tl.store(out + SIZE, (n - high * 128).to(tl.int8), mask=kept)
    tl.store(UNITS + base * G + r, unit * worth)
