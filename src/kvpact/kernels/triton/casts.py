"""Numbers as they are stored densely."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def saturated(x, TYPE: tl.constexpr):
    """Round fp32 as `arithmetic.saturated` does, ties to even.

    `TYPE`: a dtype: fp32, fp16 or bf16.
    """
    if TYPE.is_fp16():
        x = tl.clamp(x, -65504.0, 65504.0, propagate_nan=tl.PropagateNan.ALL).to(tl.float16)
    elif TYPE.is_bf16():
        # In integers: Triton's interpreter cuts bits off instead of rounding them.
        bits = x.to(tl.int32, bitcast=True)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        rounded = tl.where(x == x, rounded, 0x7FC0)
        x = rounded.to(tl.int16).to(tl.bfloat16, bitcast=True)
    return x
