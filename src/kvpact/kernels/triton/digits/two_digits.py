"""Numbers in two digits, each a column of a product of whole numbers; queries as such digits."""

from __future__ import annotations

import triton
import triton.language as tl

from kvpact.kernels.triton.transforms import rotated

MOST = tl.constexpr(32512.0)
"""127 * 256: what two digits of eight bits hold, the lower one with a sign."""
_WHOLE = tl.constexpr(12582912.0)
"""1.5 * 2**23: a sum with it has a whole number in its low bits."""


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
    """Rotate and split the queries of a KV head; grid `(heads, batch)`.

    `Q`: queries `[B, H_q, q_len, DIM]`, with the steps from batch row to row, head to head, query
    to query. `SIGNS`, `PLACES`: of the rotation; `[SPAN]` int32, where the high digit of each
    channel goes. `DIGITS`, `UNITS`: int8 `[B, H_kv, SPAN / SIZE, G, 2, SIZE]` and fp32
    `[B, H_kv, G]`, what a digit is worth. `queries`, `rows`, `heads`: queries of a head, rows of a
    KV head (`g * queries + i`), KV heads. `worth`: what the product of a query and a level is
    multiplied by. `DIM`, `WIDTH`: channels, and the power of two that they are filled up to.
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
