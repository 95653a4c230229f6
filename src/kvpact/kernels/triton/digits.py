"""Split-KV attention over packed tokens on integer tensor cores.

Levels are whole numbers of 8 bits; queries and weights are two digits of seven bits each, which
stand side by side as columns of the right operand. Products of whole numbers are exact, so only
queries and weights are rounded, to 14 bits: 2e-4 of the output's norm.

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
from kvpact.kernels.triton.operands import (
    groups_of,
    key_operand,
    key_width,
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
from kvpact.kernels.triton.tiles import load_per_token, positions, segments_of, tiles_at

MOST_DIGITS = tl.constexpr(16256.0)
"""127 * 128: what two digits hold."""


@triton.jit
def whole(x):
    """Return the numbers fp32 `[R, G]` of two digits each, `[R, 2 G]` int32."""
    high, low = tl.split(x.reshape(x.shape[0], x.shape[1] // 2, 2))
    return (high * 128 + low).to(tl.float32)


@triton.jit
def scales(tiles, live, GROUP: tl.constexpr, VBITS: tl.constexpr):
    """Return the scales fp32 `[N]` of a group of channels."""
    return load_per_token(tiles, live, GROUP * 32, VBITS).to(tl.float32)


@triton.jit
def digits_of(weights, unit):
    """Return the digits int8 `[N, 2 G]` of weights `[N, G]` in units `[G]`."""
    n = tl.floor(weights * (1.0 / unit)[None, :] + 0.5).to(tl.int32)
    pair = tl.join((n >> 7).to(tl.int8), (n & 127).to(tl.int8))
    return pair.reshape(weights.shape[0], weights.shape[1] * 2)


@triton.jit(do_not_specialize=["heads", "queries", "rows", "first_part", "parts"])
def attend_digits(
    ROWS, DIGITS, UNITS, K_TABLE, V_TABLE, PACKED, LSE, heads, queries, rows, first_part, parts,
    worth, cap, K: tl.constexpr, V: tl.constexpr, G: tl.constexpr, NT: tl.constexpr,
    INSIDE: tl.constexpr, CAPPED: tl.constexpr, KW: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """Attend over the tokens from SKIP_FROM to SKIP_TO of each row; grid `(splits, heads, batch)`.

    Parameters
    ----------
    ROWS
        The table of rows (see `columns`).
    DIGITS, UNITS
        int8 `[B, H, K's groups, G, 2, key_width]` and fp32 `[B, H, G]`, of `query_digits`.
    K_TABLE, V_TABLE
        int32 `[4, 4]`, of `tables.table_words`.
    PACKED, LSE
        fp32 `[B, H, parts, rows, D_v]` and `[B, H, parts, rows]`, base 2; written from part
        `first_part` on.
    heads, queries, rows
        KV heads, queries of a head, and rows of queries of a KV head: row `g * queries + i`.
    worth
        What a level of V is worth.
    cap
        The softcap times log2 e, if CAPPED.
    K, V
        Forms of the slots.
    G
        `rows`, filled up to a power of two.
    NT
        Tiles of a block.
    INSIDE
        Whether no block reaches over the end of a segment.
    KW
        Bytes of k that stand side by side in a thread.
    ASM
        Whether the device knows PTX.
    """
    split, head, row = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    N: tl.constexpr = NT * 32
    KG: tl.constexpr = groups_of(K)
    VG: tl.constexpr = groups_of(V)
    C: tl.constexpr = key_width(K)
    D: tl.constexpr = value_width(V)
    first, last = count_of_row(ROWS, row, SKIP_FROM), count_of_row(ROWS, row, SKIP_TO)
    # Query i sees the tokens behind `hidden + i`, so all see those from `seen` on.
    hidden = count_of_row(ROWS, row, FIRST_QUERY) - count_of_row(ROWS, row, WINDOW)
    seen = tl.maximum(first, hidden + queries)
    tiles = count_of_row(ROWS, row, K_SLOTS + 5) // 32
    kc_at, kc_head = segments_of(ROWS, row, head, K_SLOTS, 0)
    ks_at, ks_head = segments_of(ROWS, row, head, K_SLOTS, 1)
    vc_at, vc_head = segments_of(ROWS, row, head, V_SLOTS, 0)
    vs_at, vs_head = segments_of(ROWS, row, head, V_SLOTS, 1)
    begin, end = blocks_of(first, last, split, N)
    m, g, c = tl.arange(0, 2 * G), tl.arange(0, G), tl.arange(0, C)
    base = row * heads + head
    q_at = DIGITS + base * (KG * 2 * G * C) + m[None, :] * C + c[:, None]
    q = ()
    for group in tl.static_range(KG):
        q += (tl.load(q_at + group * (2 * G * C)),)
    unit = tl.load(UNITS + base * G + g)
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
        k = key_operand(kc, live, K_TABLE, 0, K, V.bits, KW, ASM)
        s = whole(tl.dot(k, q[0], out_dtype=tl.int32)) * scales(ks, live, 0, V.bits)[:, None]
        for group in tl.static_range(1, KG):
            k = key_operand(kc, live, K_TABLE, group, K, V.bits, KW, ASM)
            part = whole(tl.dot(k, q[group], out_dtype=tl.int32))
            s += part * scales(ks, live, group, V.bits)[:, None]
        s *= unit[None, :]
        if CAPPED:
            s = capped(s, cap)
        if (block * N < seen) | (block * N + N > last):
            token = positions(block * NT, NT, V.bits)
            s = hide(s, token, first, last, hidden, queries)
        p, decay, peak, total = soften(s, peak, total)
        weights = p * scales(vs, live, 0, V.bits)[:, None]
        top = tl.abs(weights)
        for group in tl.static_range(1, VG):
            top = tl.maximum(top, tl.abs(p * scales(vs, live, group, V.bits)[:, None]))
        # Of this block: so small weights of long contexts keep their digits.
        step = tl.maximum(tl.max(top, 0), 1e-30) * (1.0 / MOST_DIGITS)
        sums = ()
        for group in tl.static_range(VG):
            if group > 0:
                weights = p * scales(vs, live, group, V.bits)[:, None]
            v = value_operand(vc, live, V_TABLE, group, V, KW, ASM)
            o = whole(
                tl.dot(v, weight_operand(digits_of(weights, step), V, KW), out_dtype=tl.int32)
            )
            more = acc[group] * decay[None, :] + o * step[None, :]
            sums += (more,)
        acc = sums
    d = tl.arange(0, D)
    channel = (d // 32) * 32 + (d % 8) * 4 + (d // 8) % 4
    out = (base * parts + first_part + split) * rows + g
    for group in tl.static_range(VG):
        store_sums(PACKED, acc[group], total, worth, out, rows, group * D + channel, V.dim)
    store_lse(LSE, peak, total, out, rows)
