"""Split-KV attention over packed tokens of trellises, with products of whole numbers.

As `digits`, whose digits and parts these are; but tokens stand in their own order, so what is
decoded passes through shared memory, and keys have blocks of unlike levels, and bases.
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
from kvpact.kernels.triton.digits import MOST_DIGITS, whole
from kvpact.kernels.triton.tiles import segments_of, tiles_at
from kvpact.kernels.triton.trellis import e5m3
from kvpact.kernels.triton.trellis_bases import FIRST, MEAN
from kvpact.kernels.triton.trellis_levels import key_levels, value_levels

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def _digits(weights, unit):
    """Return `digits_of`; views come first, where the compiler does not move them away."""
    n = tl.floor(weights * (1.0 / unit)[None, :] + 0.5).to(tl.int32)
    twice = tl.join(n, n).reshape(weights.shape[0], weights.shape[1] * 2)
    upper = (tl.arange(0, weights.shape[1] * 2) % 2 == 0)[None, :]
    return tl.where(upper, twice >> 7, twice & 127).to(tl.int8)


@triton.jit
def _block_of_query(q_at, K: tl.constexpr, INDEX: tl.constexpr):
    """Load the digits of the channels of a block, in the order of `key_levels`."""
    BEGIN: tl.constexpr = K.steps[INDEX].begin
    DIM: tl.constexpr = K.steps[INDEX].dim
    if DIM < 32:
        c = tl.arange(0, 32)
        q = tl.load(q_at + (BEGIN + c // 2)[:, None])
    else:
        q = tl.load(q_at + (BEGIN + tl.arange(0, DIM))[:, None])
    return q


@triton.jit
def _of_tokens(tiles, live):
    """Return the scales of a block's tokens, fp32."""
    token = tl.arange(0, 32)
    byte = tl.load(tiles[:, None] + token[None, :], mask=live[:, None], other=0)
    return e5m3(byte.reshape(tiles.shape[0] * 32))


@triton.jit
def _first_tiles(ROWS, row, head, tile, tiles, live, SLOTS: tl.constexpr, FORM: tl.constexpr,
                 NAME: tl.constexpr, STEP: tl.constexpr, TYPE: tl.constexpr):  # fmt: skip
    """Return pointers to a field of tiles, each in its own segment."""
    at, head_bytes = segments_of(ROWS, row, head, SLOTS, FORM.index_of(NAME))
    segment = tl.where(live, tile // tiles, 0)
    return tiles_at(at, head_bytes, segment, tile - segment * tiles, STEP, TYPE)


@triton.jit
def _bases(ROWS, row, head, tile, tiles, live, query, first, K: tl.constexpr):
    """Return what bases add to the scores of a block of tokens, `[N, G]`, base 2."""
    NT: tl.constexpr = tile.shape[0]
    flags = _first_tiles(ROWS, row, head, tile, tiles, live, K_SLOTS, K, "base", 2, tl.int32)
    half, lane = tl.arange(0, 2), tl.arange(0, 16)
    words = tl.load(flags[:, None] + half[None, :], mask=live[:, None], other=0)
    flag = ((words[:, :, None] >> (lane * 2)[None, None, :]) & 3).reshape(NT * 32)[:, None]
    scores = tl.where(flag == FIRST, first[None, :], 0.0)
    if K.has("mean"):
        # A block is part of one group, whose units lie in the segment of its first tile.
        one = tl.sum(tl.where(tl.arange(0, NT) == 0, tile, 0), 0)
        segment, inside = one // tiles, one % tiles * 32 // K.trellis.center
        at, head_bytes = segments_of(ROWS, row, head, K_SLOTS, K.index_of("mean"))
        means = (tl.load(at + segment) + head_bytes).to(tl.pointer_type(tl.int8))
        mean = tl.load(means + inside * K.dim + tl.arange(0, K.dim)).to(tl.float32)
        at, head_bytes = segments_of(ROWS, row, head, K_SLOTS, K.index_of("step"))
        step = tl.load(
            (tl.load(at + segment) + head_bytes).to(tl.pointer_type(tl.float16)) + inside
        )
        at_mean = tl.sum(query * mean[None, :], 1) * step.to(tl.float32)
        scores = tl.where(flag == MEAN, at_mean[None, :], scores)
    return scores


@triton.jit(do_not_specialize=["heads", "queries", "rows", "first_part", "parts"])
def attend_trellises(
    ROWS, DIGITS, UNITS, EXACT, FIRSTS, K_TABLE, V_TABLE, PACKED, LSE,
    heads, queries, rows, first_part, parts, worth, cap,
    K: tl.constexpr, V: tl.constexpr, G: tl.constexpr, NT: tl.constexpr, CAPPED: tl.constexpr,
    ASM: tl.constexpr,
):  # fmt: skip
    """Attend over the tokens from SKIP_FROM to SKIP_TO of each row; grid `(splits, heads, batch)`.

    Parameters
    ----------
    DIGITS, UNITS
        int8 `[B, H, 1, G, 2, dim]` in the order of K's codes, and fp32 `[B, H, G]`.
    EXACT, FIRSTS
        fp32 `[B, H, rows, dim]`, scaled queries, and `[B, H, rows]`, their products with the first
        key; of no account without bases.
    K_TABLE, V_TABLE
        int32, as of `key_levels`.
    NT
        Tiles of a block; no group of tokens with a mean is smaller.
    ROWS, PACKED, LSE, heads, queries, rows, first_part, parts, worth, cap, K, V, G, CAPPED, ASM
        As of `attend_digits`.
    """
    split, head, row = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    N: tl.constexpr = NT * 32
    first, last = count_of_row(ROWS, row, SKIP_FROM), count_of_row(ROWS, row, SKIP_TO)
    # Query i sees the tokens behind `hidden + i`, so all see those from `seen` on.
    hidden = count_of_row(ROWS, row, FIRST_QUERY) - count_of_row(ROWS, row, WINDOW)
    seen = tl.maximum(first, hidden + queries)
    tiles = count_of_row(ROWS, row, K_SLOTS + 5) // 32
    begin, end = first // N, tl.cdiv(last, N)
    share = tl.cdiv(end - begin, tl.num_programs(0))
    begin += split * share
    end = tl.minimum(begin + share, end)
    m, g, d = tl.arange(0, 2 * G), tl.arange(0, G), tl.arange(0, K.dim)
    base = row * heads + head
    q_at = DIGITS + base * (2 * G * K.dim) + m[None, :] * K.dim
    unit = tl.load(UNITS + base * G + g)
    query, of_first = tl.full([G, K.dim], 0.0, tl.float32), tl.zeros([G], tl.float32)
    if K.has("base"):
        is_row = tl.broadcast_to((g < rows)[:, None], (G, K.dim))
        at = EXACT + base * rows * K.dim + (g * K.dim)[:, None] + d[None, :]
        query = tl.load(at, mask=is_row, other=0.0) * LOG2_E
        of_first = tl.load(FIRSTS + base * rows + g, mask=g < rows, other=0.0) * LOG2_E
    peak = tl.full([G], -float("inf"), tl.float32)
    total = tl.zeros([G], tl.float32)
    acc = tl.full([V.dim, G], 0.0, tl.float32)
    for block in range(begin, end):
        tile = block * NT + tl.arange(0, NT)
        live = tile * 32 < last
        kc = _first_tiles(
            ROWS, row, head, tile, tiles, live, K_SLOTS, K, "codes", K.words * 32, tl.int32
        )
        ks = _first_tiles(ROWS, row, head, tile, tiles, live, K_SLOTS, K, "scale", 32, tl.uint8)
        vc = _first_tiles(
            ROWS, row, head, tile, tiles, live, V_SLOTS, V, "codes", V.bits * V.dim, tl.int32
        )
        vs = _first_tiles(ROWS, row, head, tile, tiles, live, V_SLOTS, V, "scale", 32, tl.uint8)
        sums = tl.zeros([N, 2 * G], tl.int32)
        for i in tl.static_range(len(K.steps)):
            q = _block_of_query(q_at, K, i)
            sums += tl.dot(key_levels(kc, live, K_TABLE, K, i, ASM), q, out_dtype=tl.int32)
        s = whole(sums) * (_of_tokens(ks, live)[:, None] * unit[None, :])
        if K.has("base"):
            s += _bases(ROWS, row, head, tile, tiles, live, query, of_first, K)
        if CAPPED:
            # cap * tanh(s / cap)
            s = cap - 2.0 * cap / (tl.exp2(s * (2.8853900817779268 / cap)) + 1.0)
        if (block * N < seen) | (block * N + N > last):
            token = block * N + tl.arange(0, N)
            shown = ((token >= first) & (token < last))[:, None]
            shown = shown & (token[:, None] > (hidden + g % queries)[None, :])
            s = tl.where(shown, s, -float("inf"))
        new = tl.maximum(peak, tl.max(s, 0))
        safe = tl.where(new == -float("inf"), 0.0, new)
        decay = tl.exp2(peak - safe)
        p = tl.exp2(s - safe[None, :])
        total = total * decay + tl.sum(p, 0)
        peak = new
        weights = p * _of_tokens(vs, live)[:, None]
        # Of this block: so small weights of long contexts keep their digits.
        step = tl.maximum(tl.max(weights, 0), 1e-30) * (1.0 / MOST_DIGITS)
        v = value_levels(vc, live, V_TABLE, V, ASM)
        o = whole(tl.dot(v, _digits(weights, step), out_dtype=tl.int32))
        acc = acc * decay[None, :] + o * step[None, :]
    d = tl.arange(0, V.dim)
    out = (base * parts + first_part + split) * rows + g
    acc *= (worth / tl.where(total == 0.0, 1.0, total))[None, :]
    kept = tl.broadcast_to((g < rows)[None, :], (V.dim, G))
    tl.store(PACKED + out[None, :] * V.dim + d[:, None], acc, mask=kept)
    lse = tl.where(total == 0.0, -float("inf"), peak + tl.log2(tl.where(total == 0.0, 1.0, total)))
    tl.store(LSE + out, lse, mask=g < rows)
