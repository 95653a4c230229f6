"""Numbers in two digits, each a column of a product of whole numbers."""

from __future__ import annotations

import triton
import triton.language as tl

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
