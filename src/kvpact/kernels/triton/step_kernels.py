"""What a step does besides attending and encoding: it reads where tokens stand from the device.

Counts and addresses of each row stand in the table of `rows.py`. `begin_step` writes down where the
new tokens lie, and `end_step` counts them, so that a step's launches are the same each time: what a
CUDA graph replays.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kvpact.kernels.triton.columns import (
    COLUMNS,
    FIRST_QUERY,
    HELD,
    K_EXACT_FROM,
    K_NEW,
    K_TAIL,
    SKIP_FROM,
    SKIP_TO,
    V_EXACT_FROM,
    V_NEW,
    V_TAIL,
    WINDOW,
    of_row,
)

_STRIDES = ["k_row", "k_head", "k_token", "v_row", "v_head", "v_token"]


@triton.jit
def _place(place, X, row, x_row, x_head, x_token, SIZE: tl.constexpr):
    tl.store(place, X.to(tl.int64) + row.to(tl.int64) * x_row * SIZE)
    tl.store(place + 1, tl.cast(x_head, tl.int64) * SIZE)
    tl.store(place + 2, tl.cast(x_token, tl.int64) * SIZE)


@triton.jit(do_not_specialize=_STRIDES)
def begin_step(
    ROWS, K, V, k_row, k_head, k_token, v_row, v_head, v_token, SIZE: tl.constexpr
):  # fmt: skip
    """Write down where each row's new tokens lie. Grid: (B,).

    K, V: the new tokens, strides in numbers of SIZE bytes.
    """
    row = tl.program_id(0)
    place = ROWS + row * COLUMNS
    _place(place + K_NEW, K, row, k_row, k_head, k_token, SIZE)
    _place(place + V_NEW, V, row, v_row, v_head, v_token, SIZE)


@triton.jit
def _bad(
    X, place, MOST: tl.constexpr, LONGEST: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr
):
    """Return whether a vector has NaN, infinity, a number above MOST, or is longer than LONGEST."""
    d = tl.arange(0, WIDTH)
    x = tl.load(X + place + d, mask=d < DIM, other=0.0).to(tl.float32)
    good = (tl.abs(x) <= MOST) & (tl.abs(x) < float("inf"))
    bad = tl.max((~good).to(tl.int32), 0)
    return bad | (~(tl.sum(x * x, 0) <= LONGEST * LONGEST)).to(tl.int32)


@triton.jit(do_not_specialize=[*_STRIDES, "q_row", "q_head", "q_token"])
def check_step(
    K, V, Q, GOOD, k_row, k_head, k_token, v_row, v_head, v_token, q_row, q_head, q_token, heads,
    K_MOST: tl.constexpr, K_LONGEST: tl.constexpr, V_MOST: tl.constexpr, V_LONGEST: tl.constexpr,
    DIM: tl.constexpr, VALUE_DIM: tl.constexpr, Q_DIM: tl.constexpr,
    WIDTH: tl.constexpr, VALUE_WIDTH: tl.constexpr, Q_WIDTH: tl.constexpr,
):  # fmt: skip
    """Store 0 to GOOD, int8, where a number can't be stored. Grid: (tokens, query heads, B)."""
    token, head, row = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    at = row * q_row + head * q_head + token * q_token
    bad = _bad(Q, at, float("inf"), float("inf"), Q_DIM, Q_WIDTH)
    if head < heads:
        at = row * k_row + head * k_head + token * k_token
        bad = bad | _bad(K, at, K_MOST, K_LONGEST, DIM, WIDTH)
        at = row * v_row + head * v_head + token * v_token
        bad = bad | _bad(V, at, V_MOST, V_LONGEST, VALUE_DIM, VALUE_WIDTH)
    tl.store(GOOD, 0, mask=bad != 0)


@triton.jit(do_not_specialize=["x_row", "x_head", "x_token"])
def keep_tokens(
    ROWS, X, x_row, x_head, x_token,
    TAIL: tl.constexpr, EXACT_FROM: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Copy new tokens behind the tail, which is in their dtype. Grid: (tokens, heads, B)."""
    token, head, row = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    d = tl.arange(0, WIDTH)
    at = row.to(tl.int64) * x_row + head * x_head + token * x_token
    x = tl.load(X + at + d, mask=d < DIM)
    place = of_row(ROWS, row, HELD) - of_row(ROWS, row, EXACT_FROM) + token
    to = of_row(ROWS, row, TAIL) + head * of_row(ROWS, row, TAIL + 1)
    to += place * of_row(ROWS, row, TAIL + 2)
    tl.store(to.to(tl.pointer_type(X.dtype.element_ty)) + d, x, mask=d < DIM)


@triton.jit
def _count(ROWS, row, held, window, group, EXACT_FROM: tl.constexpr, TAIL: tl.constexpr):
    """Let a stream's tail begin where it does with so many tokens held (`Stream.exact_from`)."""
    before = of_row(ROWS, row, EXACT_FROM)
    now = tl.minimum(held - held % group, tl.maximum(held - window, 0))
    now = tl.maximum(before, now)
    tail = of_row(ROWS, row, TAIL) + (now - before) * of_row(ROWS, row, TAIL + 2)
    tl.store(ROWS + row * COLUMNS + TAIL, tail)
    tl.store(ROWS + row * COLUMNS + EXACT_FROM, now)


@triton.jit(do_not_specialize=["new", "k_window", "k_group", "v_window", "v_group"])
def end_step(ROWS, new, k_window, k_group, v_window, v_group, FAST: tl.constexpr):
    """Count the new tokens. Grid: (B,).

    FAST: whether the packed tokens from SKIP_FROM to SKIP_TO are attended by another kernel.
    """
    row = tl.program_id(0)
    held = of_row(ROWS, row, HELD) + new
    _count(ROWS, row, held, k_window, k_group, K_EXACT_FROM, K_TAIL)
    _count(ROWS, row, held, v_window, v_group, V_EXACT_FROM, V_TAIL)
    tl.store(ROWS + row * COLUMNS + HELD, held)
    query = of_row(ROWS, row, FIRST_QUERY) + new
    tl.store(ROWS + row * COLUMNS + FIRST_QUERY, query)
    if FAST:
        first = tl.maximum(of_row(ROWS, row, SKIP_FROM), query - of_row(ROWS, row, WINDOW) + 1)
        last = tl.minimum(of_row(ROWS, row, K_EXACT_FROM), of_row(ROWS, row, V_EXACT_FROM))
        tl.store(ROWS + row * COLUMNS + SKIP_FROM, first)
        tl.store(ROWS + row * COLUMNS + SKIP_TO, tl.minimum(last, query + 1))
