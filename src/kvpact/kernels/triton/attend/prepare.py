"""Queries as attention reads them: in rows of a KV head, scaled, transformed as K's slots are."""

from __future__ import annotations

import triton
import triton.language as tl

from kvpact.kernels.triton.attend.streams import rounded
from kvpact.kernels.triton.transforms import rotated


@triton.jit(do_not_specialize=["q_len", "groups", "heads", "scale"])
def prepare_queries(
    Q, SIGNS, QP, QE, q_row, q_head, q_token, q_len, groups, heads, scale,
    DIM: tl.constexpr, WIDTH: tl.constexpr, STRIDE: tl.constexpr, ROTATED: tl.constexpr,
    BOTH: tl.constexpr, ROUNDED: tl.constexpr, EACH: tl.constexpr,
):  # fmt: skip
    """Prepare EACH rows. Grid: (row tiles, heads, B).

    Q: `[B, heads * groups, q_len, DIM or more]` with strides. QP, QE: see `attend_general`; STRIDE:
    from one of their rows to the next. SIGNS: of the transform, if ROTATED. BOTH: whether QP is
    written, too. ROUNDED: whether to tf32.
    """
    head, row = tl.program_id(1), tl.program_id(2).to(tl.int64)
    count = groups * q_len
    at_row, channel = tl.program_id(0) * EACH + tl.arange(0, EACH), tl.arange(0, WIDTH)
    inside = (at_row < count)[:, None] & (channel < DIM)[None, :]
    at = row * q_row + (head * groups + at_row // q_len).to(tl.int64) * q_head
    at += (at_row % q_len).to(tl.int64) * q_token
    x = tl.load(Q + at[:, None] + channel[None, :], mask=inside, other=0.0).to(tl.float32) * scale
    at = ((row * heads + head) * count + at_row)[:, None] * STRIDE + channel[None, :]
    tl.store(QE + at, rounded(x) if ROUNDED else x, inside)
    if ROTATED:
        x = rotated(x, SIGNS, EACH, WIDTH, DIM)
    if BOTH:
        tl.store(QP + at, rounded(x) if ROUNDED else x, inside)
