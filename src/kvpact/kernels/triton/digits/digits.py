"""Split-KV attention over packed tokens on integer tensor cores.

Levels are whole numbers of 8 bits; queries and weights are two digits each, which stand side by
side as columns of the right operand. Products of whole numbers are exact, so only queries and
weights are rounded, to 14 and 16 bits: 2e-4 of the output's norm. Zeros, and what shifts K's groups
of tokens, are products of their own, in fp32. What is multiplied comes from `key_scores` and
`value_sums`, or of trellises from `trellis.scores` and `value_sums`.

A program attends for all queries of one KV head and row over a part of its packed tokens. Parts are
merged by their log-sum-exp.
"""

import triton
import triton.language as tl

from kvpact.kernels.triton.columns import (
    FIRST_QUERY,
    K_SLOTS,
    SKIP_FROM,
    SKIP_TO,
    V_SLOTS,
    WINDOW,
    count_of_row,
)
from kvpact.kernels.triton.digits.key_scores import key_scores, load_queries
from kvpact.kernels.triton.digits.operands import value_width
from kvpact.kernels.triton.digits.tiles import fields_of, positions
from kvpact.kernels.triton.digits.value_sums import channels_of, order_of, trellis_sums, value_sums
from kvpact.kernels.triton.trellis.scores import load_trellis_queries, trellis_scores


@triton.jit
def _blocks_of(first, last, split, N: tl.constexpr):
    """Return the blocks of N tokens of a part: the first, and the one after the last."""
    begin, end = first // N, tl.cdiv(last, N)
    share = tl.cdiv(end - begin, tl.num_programs(0))
    begin += split * share
    return begin, tl.minimum(begin + share, end)


@triton.jit
def _hide(s, token, first, last, hidden, queries):
    """Hide tokens `[N]` from rows `[G]`: all outside of a range, and those up to `hidden + i`."""
    g = tl.arange(0, s.shape[1])
    shown = ((token >= first) & (token < last))[:, None]
    shown = shown & (token[:, None] > (hidden + g % queries)[None, :])
    return tl.where(shown, s, -float("inf"))


@triton.jit
def _soften(s, peak, total):
    """Return weights of logits `[N, G]` of base 2, what sums so far are worth, peaks, totals."""
    new = tl.maximum(peak, tl.max(s, 0))
    safe = tl.where(new == -float("inf"), 0.0, new)
    decay = tl.exp2(peak - safe)
    p = tl.exp2(s - safe[None, :])
    return p, decay, new, total * decay + tl.sum(p, 0)


@triton.jit(do_not_specialize=["heads", "queries", "rows", "first_part", "parts"])
def attend_digits(
    ROWS, DIGITS, UNITS, NUMBERS, FIRSTS, K_TABLE, V_TABLE, PACKED, LSE,
    heads, queries, rows, first_part, parts, worth, cap,
    K: tl.constexpr, V: tl.constexpr, G: tl.constexpr, NT: tl.constexpr,
    INSIDE: tl.constexpr, CAPPED: tl.constexpr, KW: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """Attend over the tokens from SKIP_FROM to SKIP_TO of each row; grid `(splits, heads, batch)`.

    `ROWS`: the table of rows (see `columns`). `DIGITS`, `UNITS`: int8 `[B, H, groups, G, 2, width]`
    and fp32 `[B, H, G]`, of `query_digits`: K's groups of channels and `key_width`; of a trellis
    one group, the operands of its blocks side by side. `NUMBERS`: fp32, the queries themselves: in
    logits of base 2, `[B, H, G, D]`, where K has zeros or shifts; scaled, `[B, H, rows, D]`, where
    tokens have bases; None otherwise. `FIRSTS`: fp32 `[B, H, rows]`, their products with the first
    key, where tokens have bases; None otherwise. `K_TABLE`, `V_TABLE`: int32, of
    `tables.table_words` or `trellis.fast.level_table`. `PACKED`, `LSE`: fp32
    `[B, H, parts, rows, D_v]` and `[B, H, parts, rows]`, base 2; written from part `first_part` on.
    `heads`, `queries`, `rows`: KV heads, queries of a head, and rows of queries of a KV head: row
    `g * queries + i`. `worth`: what a level of V is worth. `cap`: the softcap times log2 e, if
    CAPPED. `K`, `V`: forms of the slots. `G`: `rows`, filled up to a power of two. `NT`: tiles of a
    block; no group of a trellis' tokens with a mean is smaller. `INSIDE`: whether no block reaches
    over the end of a segment. `KW`: bytes of k that stand side by side in a thread. `ASM`: whether
    the device knows PTX.
    """
    split, head, row = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    N: tl.constexpr = NT * 32
    VG: tl.constexpr = V.groups
    D: tl.constexpr = value_width(V)
    ORDER: tl.constexpr = order_of(V)
    first, last = count_of_row(ROWS, row, SKIP_FROM), count_of_row(ROWS, row, SKIP_TO)
    # Query i sees the tokens after `hidden + i`, so all see those from `seen` on.
    hidden = count_of_row(ROWS, row, FIRST_QUERY) - count_of_row(ROWS, row, WINDOW)
    seen = tl.maximum(first, hidden + queries)
    tiles = count_of_row(ROWS, row, K_SLOTS + 5) // 32
    begin, end = _blocks_of(first, last, split, N)
    g = tl.arange(0, G)
    base = row * heads + head
    if K.kind == "trellis":
        q = load_trellis_queries(DIGITS, UNITS, NUMBERS, FIRSTS, base, rows, K, G)
    else:
        q = load_queries(DIGITS, UNITS, NUMBERS, base, K, G)
    peak = tl.full([G], -float("inf"), tl.float32)
    total = tl.zeros([G], tl.float32)
    acc = ()
    for _ in tl.static_range(VG):
        acc += (tl.zeros([D, G], tl.float32),)
    for block in range(begin, end):
        tile = block * NT + tl.arange(0, NT)
        live = tile * 32 < last
        if INSIDE:
            segment = block * NT // tiles
        else:
            segment = tl.where(live, tile // tiles, 0)
        inside = tile - segment * tiles
        where = (ROWS, row, head, segment, inside)
        k = fields_of(where, K_SLOTS, K)
        v = fields_of(where, V_SLOTS, V)
        if K.kind == "trellis":
            s = trellis_scores(q, k, where, live, block, tiles, K_TABLE, K, NT, ORDER, KW, ASM)
        else:
            s = key_scores(
                q, k, where, live, block, last, tiles, K_TABLE, K, NT, ORDER, INSIDE, KW, ASM
            )
        if CAPPED:
            # cap * tanh(s / cap)
            s = cap - 2.0 * cap / (tl.exp2(s * (2.8853900817779268 / cap)) + 1.0)
        if (block * N < seen) | (block * N + N > last):
            s = _hide(s, positions(block * NT, NT, ORDER), first, last, hidden, queries)
        p, decay, peak, total = _soften(s, peak, total)
        if V.kind == "trellis":
            acc = trellis_sums(acc, decay, p, v, live, V_TABLE, V, KW, ASM)
        else:
            acc = value_sums(acc, decay, p, v, live, V_TABLE, worth, V, KW, ASM)
    out = (base * parts + first_part + split) * rows + g
    none, kept = total == 0.0, tl.arange(0, G) < rows
    total = tl.where(none, 1.0, total)
    for group in tl.static_range(VG):
        channel = group * D + channels_of(V)
        place = PACKED + out[None, :] * V.dim + channel[:, None]
        inside = kept[None, :] & (channel < V.dim)[:, None]
        tl.store(place, acc[group] * (worth / total)[None, :], mask=inside)
    # -inf where no token was seen.
    tl.store(LSE + out, tl.where(none, -float("inf"), peak + tl.log2(total)), mask=kept)
