"""Split-KV attention over packed tokens on integer tensor cores.

Levels are whole numbers of 8 bits; queries and weights are two digits each, which stand side by
side as columns of the right operand. Products of whole numbers are exact, so only queries and
weights are rounded, to 14 and 16 bits: 2e-4 of the output's norm. Zeros, and what shifts K's groups
of tokens, are products of their own, in fp32.

A program attends for all queries of one KV head and row over a part of its packed tokens. Parts are
merged by their log-sum-exp.
"""

from __future__ import annotations

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
from kvpact.kernels.triton.key_scores import key_scores, load_queries, scales, zeros_of
from kvpact.kernels.triton.operands import (
    groups_of,
    value_operand,
    value_width,
    weight_operand,
)
from kvpact.kernels.triton.parts import (
    blocks_of,
    capped,
    hide,
    soften,
    store_lse,
    store_sums,
)
from kvpact.kernels.triton.tiles import positions, segments_of, tiles_at
from kvpact.kernels.triton.two_digits import MOST, split_digits, whole


@triton.jit
def value_sums(v, weights, zeros, step, worth, FORM: tl.constexpr, KW: tl.constexpr):
    """Return sums fp32 `[D, G]` of V `[D, N]`, in levels.

    `weights`, `step`: `[N, G]`, scales included, and what their digits are worth, `[G]`; `zeros`:
    weights times zeros, `[N, G]`, if there are any.
    """
    pair = split_digits(weights * (1.0 / step)[None, :])
    pair = pair.reshape(weights.shape[0], weights.shape[1] * 2)
    pair = weight_operand(pair, FORM, KW)
    o = whole(tl.dot(v, pair, out_dtype=tl.int32), 256) * step[None, :]
    if FORM.has("zero"):
        o += (tl.sum(zeros, 0) * (1.0 / worth))[None, :]
    return o


@triton.jit(do_not_specialize=["heads", "queries", "rows", "first_part", "parts"])
def attend_digits(
    ROWS, DIGITS, UNITS, NUMBERS, K_TABLE, V_TABLE, PACKED, LSE, heads, queries, rows, first_part,
    parts, worth, cap, K: tl.constexpr, V: tl.constexpr, G: tl.constexpr, NT: tl.constexpr,
    INSIDE: tl.constexpr, CAPPED: tl.constexpr, KW: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """Attend over the tokens from SKIP_FROM to SKIP_TO of each row; grid `(splits, heads, batch)`.

    `ROWS`: the table of rows (see `columns`). `DIGITS`, `UNITS`: int8
    `[B, H, K's groups, G, 2, key_width]` and fp32 `[B, H, G]`, of `query_digits`. `NUMBERS`:
    fp32 `[B, H, G, D]`, the queries themselves in logits of base 2, where K has more beside its
    codes than scales per token; None otherwise. `K_TABLE`, `V_TABLE`:
    int32 `[4, 4]`, of `tables.table_words`. `PACKED`, `LSE`: fp32 `[B, H, parts, rows, D_v]` and
    `[B, H, parts, rows]`, base 2; written from part `first_part` on. `heads`, `queries`, `rows`: KV
    heads, queries of a head, and rows of queries of a KV head: row `g * queries + i`. `cap`: the
    softcap times log2 e, if CAPPED. `K`, `V`: forms of the slots. `G`: `rows`, filled up to a power
    of two. `INSIDE`: whether no block reaches over the end of a segment. `KW`: bytes of k that
    stand side by side in a thread. `ASM`: whether the device knows PTX.
    """
    split, head, row = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    N: tl.constexpr = NT * 32
    KG: tl.constexpr = groups_of(K)
    VG: tl.constexpr = groups_of(V)
    D: tl.constexpr = value_width(V)
    VBITS: tl.constexpr = V.bits
    first, last = count_of_row(ROWS, row, SKIP_FROM), count_of_row(ROWS, row, SKIP_TO)
    # Query i sees the tokens behind `hidden + i`, so all see those from `seen` on.
    hidden = count_of_row(ROWS, row, FIRST_QUERY) - count_of_row(ROWS, row, WINDOW)
    seen = tl.maximum(first, hidden + queries)
    tiles = count_of_row(ROWS, row, K_SLOTS + 5) // 32
    kc_at, kc_head = segments_of(ROWS, row, head, K_SLOTS, K.index_of("codes"))
    ks_at, ks_head = segments_of(ROWS, row, head, K_SLOTS, K.index_of("scale"))
    kz_at, kz_head = segments_of(ROWS, row, head, K_SLOTS, K.index_of("zero"))
    shift_at, shift_head = segments_of(ROWS, row, head, K_SLOTS, K.index_of("shift"))
    vc_at, vc_head = segments_of(ROWS, row, head, V_SLOTS, V.index_of("codes"))
    vs_at, vs_head = segments_of(ROWS, row, head, V_SLOTS, V.index_of("scale"))
    vz_at, vz_head = segments_of(ROWS, row, head, V_SLOTS, V.index_of("zero"))
    begin, end = blocks_of(first, last, split, N)
    g = tl.arange(0, G)
    base = row * heads + head
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
        kc = tiles_at(kc_at, kc_head, segment, inside, K.words * 32, tl.int32)
        ks = tiles_at(ks_at, ks_head, segment, inside, KG * 32, tl.float16)
        vc = tiles_at(vc_at, vc_head, segment, inside, V.words * V.dim, tl.int32)
        vs = tiles_at(vs_at, vs_head, segment, inside, VG * 32, tl.float16)
        kz = tiles_at(kz_at, kz_head, segment, inside, KG * 32, tl.float16)
        vz = tiles_at(vz_at, vz_head, segment, inside, VG * 32, tl.float16)
        s = key_scores(
            q, kc, ks, kz, shift_at, shift_head, K_TABLE, live, block, last, tiles, K, NT, VBITS,
            INSIDE, KW, ASM,
        )  # fmt: skip
        if CAPPED:
            s = capped(s, cap)
        if (block * N < seen) | (block * N + N > last):
            token = positions(block * NT, NT, VBITS)
            s = hide(s, token, first, last, hidden, queries)
        p, decay, peak, total = soften(s, peak, total)
        weights = p * scales(vs, live, 0, VBITS)[:, None]
        top = tl.abs(weights)
        for group in tl.static_range(1, VG):
            top = tl.maximum(top, tl.abs(p * scales(vs, live, group, VBITS)[:, None]))
        # Of this block: so small weights of long contexts keep their digits.
        step = tl.maximum(tl.max(top, 0), 1e-30) * (1.0 / MOST)
        sums = ()
        for group in tl.static_range(VG):
            if group > 0:
                weights = p * scales(vs, live, group, VBITS)[:, None]
            v = value_operand(vc, live, V_TABLE, group, V, KW, ASM)
            zeros = p
            if V.has("zero"):
                zeros = p * zeros_of(vz, vs, live, group, V, VBITS)[:, None]
            o = value_sums(v, weights, zeros, step, worth, V, KW)
            sums += (acc[group] * decay[None, :] + o,)
        acc = sums
    d = tl.arange(0, D)
    channel = (d // 32) * 32 + (d % 8) * 4 + (d // 8) % 4
    out = (base * parts + first_part + split) * rows + g
    for group in tl.static_range(VG):
        store_sums(PACKED, acc[group], total, worth, out, rows, group * D + channel, V.dim)
    store_lse(LSE, peak, total, out, rows)
