"""Split-KV attention over packed tokens of trellises, with products of whole numbers.

As `digits`, whose digits and parts these are; but keys have blocks of unlike levels, and bases.
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
from kvpact.kernels.triton.parts import (
    blocks_of,
    capped,
    hide,
    soften,
    store_lse,
    store_sums,
)
from kvpact.kernels.triton.tiles import (
    grouped,
    load_per_token,
    positions,
    segments_of,
    tiles_at,
    token_places,
)
from kvpact.kernels.triton.trellis import e5m3
from kvpact.kernels.triton.trellis_bases import FIRST, MEAN
from kvpact.kernels.triton.trellis_keys import key_begin, key_levels, key_words, operand_width
from kvpact.kernels.triton.trellis_values import (
    channels_of_values,
    order_of,
    trellis_weights,
    value_levels,
)
from kvpact.kernels.triton.two_digits import MOST, split_digits, whole

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def _tiles(ROWS, row, head, segment, inside, SLOTS: tl.constexpr, FORM: tl.constexpr,
           NAME: tl.constexpr, STEP: tl.constexpr, TYPE: tl.constexpr):  # fmt: skip
    """Return pointers to a field of tiles whose units fill 16 bytes."""
    at, head_bytes = segments_of(ROWS, row, head, SLOTS, FORM.index_of(NAME))
    return tiles_at(at, head_bytes, segment, inside, STEP, TYPE)


@triton.jit
def _units(ROWS, row, head, segment, K: tl.constexpr, NAME: tl.constexpr, TYPE: tl.constexpr):
    """Return pointers to a field of K in segments."""
    at, head_bytes = segments_of(ROWS, row, head, K_SLOTS, K.index_of(NAME))
    return (tl.load(at + segment) + head_bytes).to(tl.pointer_type(TYPE))


@triton.jit
def _flags(flags, live, VBITS: tl.constexpr):
    """Return which base each token has, `[N]` in the order of the scores."""
    at = grouped(flags, VBITS)[:, None, None, :, None]
    seen = grouped(live, VBITS)[:, None, None, :, None]
    R: tl.constexpr = 4 if VBITS == 2 else 8
    words = tl.load(at + (tl.arange(0, R) // (R // 2))[None, None, None, None, :], mask=seen)
    place = token_places(VBITS, 0).permute(0, 2, 1)[None, :, :, None, :]
    return (words >> (place * 2) & 3).reshape(flags.shape[0] * 32)


@triton.jit
def _of_mean(ROWS, row, head, tile, tiles, query, K: tl.constexpr):
    """Return the products of queries and the mean of a tile's group, `[G]`."""
    segment, inside = tile // tiles, tile % tiles * 32 // K.trellis.center
    means = _units(ROWS, row, head, segment, K, "mean", tl.int8) + inside * K.dim
    mean = tl.load(tl.multiple_of(means, 16) + tl.arange(0, K.dim)).to(tl.float32)
    step = tl.load(_units(ROWS, row, head, segment, K, "step", tl.float16) + inside)
    return tl.sum(query * mean[None, :], 1) * step.to(tl.float32)


@triton.jit
def _of_bases(flag, first, mean, K: tl.constexpr):
    """Return what bases add to the scores of tokens, `[N, G]`."""
    flag = flag[:, None]
    scores = tl.where(flag == FIRST, first[None, :], 0.0)
    if K.has("mean"):
        scores = tl.where(flag == MEAN, mean[None, :], scores)
    return scores


@triton.jit(do_not_specialize=["heads", "queries", "rows", "first_part", "parts"])
def attend_trellises(
    ROWS, DIGITS, UNITS, EXACT, FIRSTS, K_TABLE, V_TABLE, PACKED, LSE,
    heads, queries, rows, first_part, parts, worth, cap,
    K: tl.constexpr, V: tl.constexpr, G: tl.constexpr, NT: tl.constexpr,
    INSIDE: tl.constexpr, CAPPED: tl.constexpr, KW: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """Attend over the tokens from SKIP_FROM to SKIP_TO of each row; grid `(splits, heads, batch)`.

    `DIGITS`, `UNITS`: int8 `[B, H, 1, G, 2, width]`, the operands of K's blocks side by side, and
    fp32 `[B, H, G]`. `EXACT`, `FIRSTS`: fp32 `[B, H, rows, dim]`, scaled queries, and
    `[B, H, rows]`, their products with the first key; of no account without bases. `NT`: tiles of a
    block; no group of tokens with a mean is smaller. `ROWS`, `PACKED`, `LSE`, `heads`, `queries`,
    `rows`, `first_part`, `parts`, `worth`, `cap`, `K`, `V`, `G`: as of `attend_digits`. `INSIDE`,
    `CAPPED`, `KW`, `ASM`: as of `attend_digits`.
    """
    split, head, row = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    N: tl.constexpr = NT * 32
    ORDER: tl.constexpr = order_of(V)
    WIDTH: tl.constexpr = key_begin(K, len(K.steps))
    first, last = count_of_row(ROWS, row, SKIP_FROM), count_of_row(ROWS, row, SKIP_TO)
    # Query i sees the tokens behind `hidden + i`, so all see those from `seen` on.
    hidden = count_of_row(ROWS, row, FIRST_QUERY) - count_of_row(ROWS, row, WINDOW)
    seen = tl.maximum(first, hidden + queries)
    tiles = count_of_row(ROWS, row, K_SLOTS + 5) // 32
    begin, end = blocks_of(first, last, split, N)
    m, g = tl.arange(0, 2 * G), tl.arange(0, G)
    base = row * heads + head
    q_at = DIGITS + base * (2 * G * WIDTH) + m[None, :] * WIDTH
    q = ()
    for i in tl.static_range(len(K.steps)):
        c = key_begin(K, i) + tl.arange(0, operand_width(K, i))
        q += (tl.load(q_at + c[:, None]),)
    unit = tl.load(UNITS + base * G + g)
    query, of_first = tl.full([G, K.dim], 0.0, tl.float32), tl.zeros([G], tl.float32)
    if K.has("base"):
        d = tl.arange(0, K.dim)
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
        if INSIDE:
            segment = block * NT // tiles
        else:
            segment = tl.where(live, tile // tiles, 0)
        inside = tile - segment * tiles
        kc = _tiles(ROWS, row, head, segment, inside, K_SLOTS, K, "codes", K.words * 32, tl.int32)
        ks = _tiles(ROWS, row, head, segment, inside, K_SLOTS, K, "scale", 32, tl.uint8)
        vc = _tiles(ROWS, row, head, segment, inside, V_SLOTS, V, "codes", V.bits * V.dim, tl.int32)
        vs = _tiles(ROWS, row, head, segment, inside, V_SLOTS, V, "scale", 32, tl.uint8)
        words = key_words(kc, live, 0, K, ORDER)
        sums = tl.zeros([N, 2 * G], tl.int32)
        # The longest table last: so fewer registers are taken at a time.
        for i in tl.static_range(len(K.steps)):
            k = key_levels(words, K_TABLE, K, len(K.steps) - 1 - i, KW, ASM)
            sums = tl.dot(k, q[len(K.steps) - 1 - i], acc=sums, out_dtype=tl.int32)
        s = whole(sums) * (e5m3(load_per_token(ks, live, 0, ORDER))[:, None] * unit[None, :])
        if K.has("base"):
            flags = _units(ROWS, row, head, segment, K, "base", tl.int32) + inside * 2
            at_mean = of_first
            if K.has("mean"):
                at_mean = _of_mean(ROWS, row, head, block * NT, tiles, query, K)
            s += _of_bases(_flags(flags, live, ORDER), of_first, at_mean, K)
        if CAPPED:
            s = capped(s, cap)
        if (block * N < seen) | (block * N + N > last):
            s = hide(s, positions(block * NT, NT, ORDER), first, last, hidden, queries)
        p, decay, peak, total = soften(s, peak, total)
        weights = p * e5m3(load_per_token(vs, live, 0, ORDER))[:, None]
        # Of this block: so small weights of long contexts keep their digits.
        step = tl.maximum(tl.max(weights, 0), 1e-30) * (1.0 / MOST)
        pair = split_digits(weights * (1.0 / step)[None, :]).reshape(N, 2 * G)
        pair = trellis_weights(pair, V, KW)
        v = value_levels(vc, live, V_TABLE, V, KW, ASM)
        o = whole(tl.dot(v, pair, out_dtype=tl.int32), 256)
        acc = acc * decay[None, :] + o * step[None, :]
    out = (base * parts + first_part + split) * rows + g
    store_sums(PACKED, acc, total, worth, out, rows, channels_of_values(V), V.dim)
    store_lse(LSE, peak, total, out, rows)
