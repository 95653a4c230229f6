"""The merge of attention's parts into one output: weighed, rotated back and rounded."""

import triton
import triton.language as tl

from kvpact.kernels.triton.columns import OUTPUT, SINK_LOGITS, of_row
from kvpact.kernels.triton.step.kernels import advance
from kvpact.kernels.triton.transforms import rotated_back, saturated

LOG2_E = tl.constexpr(1.4426950408889634)


_COUNTS = ["q_len", "groups", "heads", "splits", "parts"]


@triton.jit(do_not_specialize=[*_COUNTS, "sum_row", "sum_head", "sum_token"])
def merge_parts(
    ROWS, PACKED, EXACT, LSE, SIGNS, OUT, q_len, groups, heads, splits, parts,
    NEW, NEW_LSE, new_row, new_head, new_token, sum_row, sum_head, sum_token,
    DIM: tl.constexpr, WIDTH: tl.constexpr, HAS_PACKED: tl.constexpr, ROTATED: tl.constexpr,
    APART: tl.constexpr, EACH: tl.constexpr, AT_ONCE: tl.constexpr, COUNTING: tl.constexpr,
):  # fmt: skip
    """Merge the parts of EACH query rows, AT_ONCE of them at a time. Grid: (row tiles, heads, B).

    PACKED, LSE: `parts` of them; EXACT: the first `splits` (see `attend_general`). SIGNS: of V's
    transform. OUT: `[rows, heads * groups, q_len, DIM]`. A row that saw no token gets zeros.

    NEW, NEW_LSE: if APART, one part more (see `prompt.PromptTokens`), with the steps from batch row
    to row, query head to head, query to query.
    """
    head, row = tl.program_id(1), tl.program_id(2)
    if COUNTING is not None:  # noqa: SIM102 (known when it is compiled; the other is not)
        if (tl.program_id(0) == 0) & (head == 0):
            advance(ROWS, row, COUNTING)
    count = groups * q_len
    at_row = tl.program_id(0) * EACH + tl.arange(0, EACH)
    live = at_row < count
    at_head = (row * heads + head).to(tl.int64)
    query_head = head * groups + at_row // q_len
    channel, some = tl.arange(0, WIDTH), tl.arange(0, AT_ONCE)
    inside = live[:, None, None] & (channel < DIM)[None, None, :]

    peak = tl.full([EACH], -float("inf"), tl.float32)
    logits = of_row(ROWS, row, SINK_LOGITS)
    if logits != 0:
        at = logits.to(tl.pointer_type(tl.float32)) + query_head
        peak = tl.load(at, mask=live, other=-float("inf")) * LOG2_E
    weight = tl.where(peak == -float("inf"), 0.0, 1.0)
    exact = tl.zeros([EACH, WIDTH], tl.float32)
    packed = tl.zeros([EACH, WIDTH], tl.float32)
    if APART:
        batch_row, query = row.to(tl.int64), (at_row % q_len).to(tl.int64)
        place = batch_row * sum_row + query_head * sum_head + query * sum_token
        first_lse = tl.load(NEW_LSE + place, mask=live, other=-float("inf")) * LOG2_E
        first_top = tl.maximum(peak, first_lse)
        floor = tl.where(first_top == -float("inf"), 0.0, first_top)
        share = tl.exp2(first_lse - floor)
        weight = weight * tl.exp2(peak - floor) + share
        peak = first_top
        place = batch_row * new_row + query_head.to(tl.int64) * new_head + query * new_token
        known = live[:, None] & (channel < DIM)[None, :]
        first_x = tl.load(NEW + place[:, None] + channel[None, :], mask=known, other=0.0)
        exact = first_x.to(tl.float32) * share[:, None]
    for first in range(0, parts, AT_ONCE):
        part = first + some
        there = live[:, None] & (part < parts)[None, :]
        at = (at_head * parts + part)[None, :] * count + at_row[:, None]
        lse = tl.load(LSE + at, mask=there, other=-float("inf"))
        top = tl.maximum(peak, tl.max(lse, 1))
        safe = tl.where(top == -float("inf"), 0.0, top)
        decay = tl.exp2(peak - safe)
        weights = tl.exp2(lse - safe[:, None])
        weight = weight * decay + tl.sum(weights, 1)
        peak = top
        there = inside & (weights > 0.0)[:, :, None]
        if HAS_PACKED:
            x = tl.load(
                PACKED + at[:, :, None] * DIM + channel[None, None, :], mask=there, other=0.0
            )
            packed = packed * decay[:, None] + tl.sum(x * weights[:, :, None], 1)
        at = (at_head * splits + part)[None, :] * count + at_row[:, None]
        x = tl.load(
            EXACT + at[:, :, None] * DIM + channel[None, None, :],
            mask=there & (part < splits)[None, :, None],
            other=0.0,
        )
        exact = exact * decay[:, None] + tl.sum(x * weights[:, :, None], 1)
    weight = tl.where(weight == 0.0, 1.0, weight)
    x = exact / weight[:, None]
    if HAS_PACKED:
        packed = packed / weight[:, None]
        if ROTATED:
            packed = rotated_back(packed, SIGNS, EACH, WIDTH, DIM)
        x += packed
    at = of_row(ROWS, row, OUTPUT) * heads * groups + query_head
    at = (at * q_len + at_row % q_len)[:, None] * DIM + channel[None, :]
    inside = live[:, None] & (channel < DIM)[None, :]
    tl.store(OUT + at, saturated(x, OUT.dtype.element_ty), inside)
