"""Attention over everything: packed and exact tokens of any format, in one online softmax.

Each program attends with some query rows of one KV head over a part of the tokens, in tiles of 32.
A tile may hold packed and exact tokens, and K's need not be V's: which it holds is asked per tile,
so that all threads of a program take the same way. The parts are merged by `merge.py`.

Query rows of a KV head are numbered `g * q_len + i` (query i of the head's group g). A program's
rows are consecutive in `i * groups + g`, so that they see much the same tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl

from kvpact.kernels.triton.columns import (
    CAUSAL,
    FIRST_QUERY,
    HELD,
    K_EXACT_FROM,
    K_NEW,
    K_SINK,
    K_SINKS,
    K_SLOTS,
    K_TAIL,
    MASK,
    NEW,
    PADDING,
    SINKS_FROM,
    SKIP_FROM,
    SKIP_TO,
    V_EXACT_FROM,
    V_NEW,
    V_SINK,
    V_SINKS,
    V_SLOTS,
    V_TAIL,
    WINDOW,
    count_of_row,
    of_row,
)
from kvpact.kernels.triton.forms import SlotForm
from kvpact.kernels.triton.slots import pointer_to, tile_numbers

TILE = tl.constexpr(32)
LOG2_E = tl.constexpr(1.4426950408889634)


@dataclass(frozen=True)
class Variant:
    """What the kernel is compiled for.

    Parameters
    ----------
    k, v : SlotForm or None
        Of the slots; None where there are none.
    dim, value_dim : int
        Channels of K and of V.
    width, value_width : int
        The same, padded to powers of two.
    k_type, v_type : str
        Dtypes of exact tokens, values of `NUMBERS`.
    aligned : bool
        Whether all addresses and steps of exact tokens are multiples of 16 bytes.
    rows : int
        Query rows of a program.
    thrice : bool
        Whether products are those of fp32 (three products in tf32), or of numbers rounded to tf32.
    softcap : bool
        Whether there is one.
    mask : {"", "u8", "fp32"}
        None, boolean or additive.
    """

    k: SlotForm | None
    v: SlotForm | None
    dim: int
    value_dim: int
    width: int
    value_width: int
    k_type: str
    v_type: str
    aligned: bool
    rows: int
    thrice: bool
    softcap: bool
    mask: str


@triton.jit
def tanh(x):
    """Hyperbolic tangent, to 2 units in the last place for small numbers too (Cephes' tanhf)."""
    y = x * x
    p = -5.70498872745e-3 * y + 2.06390887954e-2
    p = p * y - 5.37397155531e-2
    p = p * y + 1.33314422036e-1
    p = p * y - 3.33332819422e-1
    small = p * y * x + x
    large = 1.0 - 2.0 / (tl.exp2(tl.minimum(tl.abs(x), 10.0) * (2.0 * LOG2_E)) + 1.0)
    return tl.where(tl.abs(x) < 0.625, small, tl.where(x < 0.0, -large, large))


@triton.jit
def rounded(x):
    """Return fp32 numbers rounded to tf32, whose lower bits tensor cores cut off."""
    bits = x.to(tl.int32, bitcast=True)
    return ((bits + 0x1000) & -0x2000).to(tl.float32, bitcast=True)


@triton.jit
def product(a, b, sums, THRICE: tl.constexpr, ROUNDED: tl.constexpr):
    """Return `a @ b + sums`: in fp32, or (not THRICE) of numbers in tf32.

    ROUNDED: `b` is in tf32 already; `a` has to be.
    """
    if THRICE:
        return tl.dot(a, b, sums, input_precision="tf32x3")
    if not ROUNDED:
        b = rounded(b)
    return tl.dot(a, b, sums, input_precision="tf32")


@triton.jit
def exact_tokens(
    ROWS, row, head, tokens, exact_from, held, total, sinks_from, sinks,
    TAIL: tl.constexpr, SINK: tl.constexpr, FRESH: tl.constexpr,
    DIM: tl.constexpr, WIDTH: tl.constexpr, TYPE: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """Return a tile's exact tokens in fp32, `[32, WIDTH]`; zeros for others."""
    fresh, tail = tokens >= held, (tokens >= exact_from) & (tokens < held)
    sink = (tokens < exact_from) & (tokens >= sinks_from) & (tokens < sinks_from + sinks)
    at = tl.where(fresh, of_row(ROWS, row, FRESH), of_row(ROWS, row, SINK))
    at = tl.where(tail, of_row(ROWS, row, TAIL), at)
    step = tl.where(fresh, of_row(ROWS, row, FRESH + 1), of_row(ROWS, row, SINK + 1))
    step = tl.where(tail, of_row(ROWS, row, TAIL + 1), step)
    at += step * head
    step = tl.where(fresh, of_row(ROWS, row, FRESH + 2), of_row(ROWS, row, SINK + 2))
    step = tl.where(tail, of_row(ROWS, row, TAIL + 2), step)
    at += step * (tokens - tl.where(fresh, held, tl.where(tail, exact_from, sinks_from)))
    token = at.to(pointer_to(TYPE))
    if ALIGNED:
        token = tl.multiple_of(token, 16)
    channel = tl.arange(0, WIDTH)
    live = (fresh | tail | sink) & (tokens < total)
    x = tl.load(
        token[:, None] + channel[None, :], mask=live[:, None] & (channel < DIM)[None, :], other=0.0
    )
    return x.to(tl.float32)


@triton.jit
def packed_tokens(
    ROWS, row, head, LEVELS, tile, tokens, exact_from, sinks_from, sinks,
    SLOTS: tl.constexpr, FORM: tl.constexpr,
):  # fmt: skip
    """Return packed tokens of a tile in fp32, still transformed, `[32, padded]`; else zeros."""
    table = of_row(ROWS, row, SLOTS).to(tl.pointer_type(tl.int64))
    heads = of_row(ROWS, row, SLOTS + 1).to(tl.pointer_type(tl.int64))
    slot_row, slot_rows = of_row(ROWS, row, SLOTS + 2), of_row(ROWS, row, SLOTS + 3)
    segments = of_row(ROWS, row, SLOTS + 4)
    tiles = count_of_row(ROWS, row, SLOTS + 5) // TILE
    x = tile_numbers(
        table, heads, LEVELS, slot_row, head, tile // tiles, tile % tiles, slot_rows, segments, FORM
    )
    packed = (tokens < exact_from) & ~((tokens >= sinks_from) & (tokens < sinks_from + sinks))
    return tl.where(packed[:, None], x, 0.0)


@triton.jit
def attend_general(
    ROWS, QP, QE, K_LEVELS, V_LEVELS, PACKED, EXACT, LSE,
    q_len, groups, heads, splits, parts, softcap, VARIANT: tl.constexpr,
):  # fmt: skip
    """Attend with some rows over a part of the tokens. Grid: (splits, row tiles * heads, B).

    QP, QE: `[B, heads, groups * q_len, dim]` fp32, scaled; for packed and for exact tokens.
    PACKED: `[B, heads, parts, groups * q_len, value_dim]` fp32, still transformed; EXACT likewise
    with `splits` parts, as tokens were given. Both over the part's sum of weights, whose logarithm
    to base 2 is LSE, `[B, heads, parts, groups * q_len]`; -inf where no token was seen.
    """
    K: tl.constexpr = VARIANT.k
    V: tl.constexpr = VARIANT.v
    part, row = tl.program_id(0), tl.program_id(2)
    head, first_row = tl.program_id(1) % heads, tl.program_id(1) // heads * VARIANT.rows
    count = groups * q_len
    place = first_row + tl.arange(0, VARIANT.rows)
    live = place < count
    query, group = place // groups, place % groups
    at_row = group * q_len + query
    at_head = (row * heads + head).to(tl.int64)

    held, total = count_of_row(ROWS, row, HELD), count_of_row(ROWS, row, HELD)
    total += count_of_row(ROWS, row, NEW)
    k_from, v_from = count_of_row(ROWS, row, K_EXACT_FROM), count_of_row(ROWS, row, V_EXACT_FROM)
    k_sinks, v_sinks = count_of_row(ROWS, row, K_SINKS), count_of_row(ROWS, row, V_SINKS)
    sinks_from = count_of_row(ROWS, row, SINKS_FROM)
    padding, window = count_of_row(ROWS, row, PADDING), count_of_row(ROWS, row, WINDOW)
    skip_from, skip_to = count_of_row(ROWS, row, SKIP_FROM), count_of_row(ROWS, row, SKIP_TO)
    first_query = count_of_row(ROWS, row, FIRST_QUERY)
    causal = of_row(ROWS, row, CAUSAL) != 0
    position = first_query + query

    # Tiles that some of the rows may see, less those that another kernel attends.
    lowest = first_query + first_row // groups
    highest = first_query + tl.minimum(first_row + VARIANT.rows - 1, count - 1) // groups
    first = tl.maximum(tl.maximum(padding, lowest - window + 1), 0) // TILE
    last = tl.where(causal, tl.minimum(total, highest + 1), total)
    last = tl.maximum((last + TILE - 1) // TILE, first)
    gap = tl.minimum(tl.maximum((skip_from + TILE - 1) // TILE, first), last)
    gap_end = tl.minimum(tl.maximum(skip_to // TILE, gap), last)
    each = (last - first - (gap_end - gap) + splits - 1) // splits
    begin = first + part * each
    end = tl.minimum(begin + each, last - (gap_end - gap))

    channel = tl.arange(0, VARIANT.width)
    # Queries of one head; 32 bits tell them apart.
    QP += at_head * count * VARIANT.dim
    QE += at_head * count * VARIANT.dim
    rows_at = (at_row * VARIANT.dim)[:, None] + channel[None, :]
    inside = live[:, None] & (channel < VARIANT.dim)[None, :]
    peak = tl.full([VARIANT.rows], -float("inf"), tl.float32)
    weight = tl.zeros([VARIANT.rows], tl.float32)
    exact = tl.zeros([VARIANT.rows, VARIANT.value_width], tl.float32)
    packed = tl.zeros([VARIANT.rows, VARIANT.value_width], tl.float32)

    for index in range(begin, end):
        tile = tl.where(index >= gap, index + (gap_end - gap), index)
        start = tile * TILE
        tokens = start + tl.arange(0, TILE)
        logits = tl.zeros([VARIANT.rows, TILE], tl.float32)
        if K is not None:  # noqa: SIM102 (known when it is compiled; the other is not)
            if start < k_from:
                k = packed_tokens(
                    ROWS, row, head, K_LEVELS, tile, tokens, k_from, sinks_from, k_sinks, K_SLOTS, K
                )
                # Loaded per tile: held in registers, queries would leave none for the rest.
                q = tl.load(QP + rows_at, mask=inside, other=0.0)
                if not VARIANT.thrice:
                    q = rounded(q)
                logits = product(q, tl.trans(k), logits, VARIANT.thrice, False)
        if (start + TILE > k_from) | (start < sinks_from + k_sinks):
            k = exact_tokens(
                ROWS, row, head, tokens, k_from, held, total, sinks_from, k_sinks,
                K_TAIL, K_SINK, K_NEW,
                VARIANT.dim, VARIANT.width, VARIANT.k_type, VARIANT.aligned,
            )  # fmt: skip
            q = tl.load(QE + rows_at, mask=inside, other=0.0)
            if not VARIANT.thrice:
                q = rounded(q)
            logits = product(q, tl.trans(k), logits, VARIANT.thrice, True)
        if VARIANT.softcap:
            logits = tanh(logits / softcap) * softcap

        seen = (
            (tokens >= padding) & (tokens < total) & ~((tokens >= skip_from) & (tokens < skip_to))
        )
        seen = seen[None, :] & live[:, None] & (tokens[None, :] > (position - window)[:, None])
        seen = seen & (tokens[None, :] <= tl.where(causal, position, total)[:, None])
        if VARIANT.mask != "":
            at = of_row(ROWS, row, MASK) + (head * groups + group) * of_row(ROWS, row, MASK + 1)
            at = (at + query * of_row(ROWS, row, MASK + 2))[:, None]
            at += tokens[None, :] * of_row(ROWS, row, MASK + 3)
            mask = tl.load(at.to(pointer_to(VARIANT.mask)), mask=seen, other=0)
            if VARIANT.mask == "u8":
                seen = seen & (mask != 0)
            else:
                logits += mask
        logits = tl.where(seen, logits * LOG2_E, -float("inf"))

        # A row that has seen no token yet keeps a peak of -inf; 0 stands in for it.
        top = tl.maximum(peak, tl.max(logits, 1))
        safe = tl.where(top == -float("inf"), 0.0, top)
        decay = tl.exp2(peak - safe)
        weights = tl.exp2(logits - safe[:, None])
        if not VARIANT.thrice:
            weights = rounded(weights)
        weight = weight * decay + tl.sum(weights, 1)
        exact *= decay[:, None]
        peak = top
        if V is not None:
            packed *= decay[:, None]
            if start < v_from:
                v = packed_tokens(
                    ROWS, row, head, V_LEVELS, tile, tokens, v_from, sinks_from, v_sinks, V_SLOTS, V
                )
                packed = product(weights, v, packed, VARIANT.thrice, False)
        if (start + TILE > v_from) | (start < sinks_from + v_sinks):
            v = exact_tokens(
                ROWS, row, head, tokens, v_from, held, total, sinks_from, v_sinks,
                V_TAIL, V_SINK, V_NEW,
                VARIANT.value_dim, VARIANT.value_width, VARIANT.v_type, VARIANT.aligned,
            )  # fmt: skip
            exact = product(weights, v, exact, VARIANT.thrice, True)

    safe = tl.where(weight == 0.0, 1.0, weight)
    channel = tl.arange(0, VARIANT.value_width)
    inside = live[:, None] & (channel < VARIANT.value_dim)[None, :]
    at = (at_head * splits + part) * count + at_row
    tl.store(
        EXACT + at[:, None] * VARIANT.value_dim + channel[None, :], exact / safe[:, None], inside
    )
    at = (at_head * parts + part) * count + at_row
    if V is not None:
        tl.store(
            PACKED + at[:, None] * VARIANT.value_dim + channel[None, :],
            packed / safe[:, None],
            inside,
        )
    lse = tl.where(weight == 0.0, -float("inf"), peak + tl.log2(safe))
    tl.store(LSE + at, lse, live)
