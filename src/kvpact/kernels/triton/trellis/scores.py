"""Scores of a block of trellises, whose keys have blocks of unlike levels, and bases."""

import triton
import triton.language as tl

from kvpact.kernels.triton.columns import K_SLOTS
from kvpact.kernels.triton.digits.levels import whole
from kvpact.kernels.triton.digits.tiles import grouped, load_per_token, segments_of, token_places
from kvpact.kernels.triton.slots import pointer_to
from kvpact.kernels.triton.trellis.keys import key_begin, key_levels, key_words, operand_width
from kvpact.kernels.triton.trellis.numbers import FIRST, MEAN, e5m3

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def _units(where, segment, K: tl.constexpr, NAME: tl.constexpr):
    """Return pointers to a field of K in segments; `where`: as of `tiles.fields_of`."""
    at, head_bytes = segments_of(where[0], where[1], where[2], K_SLOTS, K.index_of(NAME))
    return (tl.load(at + segment) + head_bytes).to(pointer_to(K.type_of(NAME)))


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
def _of_mean(where, tile, tiles, query, K: tl.constexpr):
    """Return the products of queries and the mean of a tile's group, `[G]`."""
    segment, inside = tile // tiles, tile % tiles * 32 // K.trellis.center
    means = _units(where, segment, K, "mean") + inside * K.dim
    mean = tl.load(tl.multiple_of(means, 16) + tl.arange(0, K.dim)).to(tl.float32)
    step = tl.load(_units(where, segment, K, "step") + inside)
    return tl.sum(query * mean[None, :], 1) * step.to(tl.float32)


@triton.jit
def _of_bases(flag, first, mean, K: tl.constexpr):
    """Return what bases add to the scores of tokens, `[N, G]`."""
    flag = flag[:, None]
    scores = tl.where(flag == FIRST, first[None, :], 0.0)
    if K.has("mean"):
        scores = tl.where(flag == MEAN, mean[None, :], scores)
    return scores


@triton.jit
def load_trellis_queries(
    DIGITS, UNITS, EXACT, FIRSTS, base, rows, K: tl.constexpr, G: tl.constexpr
):
    """Load the queries of a KV head, number `base`.

    Returns int8 `[operand_width, 2 G]` of each block, and what they are worth, `[G]`. Then fp32
    `[G, D]` and `[G]`, in logits of base 2: the queries themselves, and their products with the
    first key, where there are bases.
    """
    m, g = tl.arange(0, 2 * G), tl.arange(0, G)
    WIDTH: tl.constexpr = key_begin(K, len(K.steps))
    q_at = DIGITS + base * (2 * G * WIDTH) + m[None, :] * WIDTH
    digits = ()
    for i in tl.static_range(len(K.steps)):
        c = key_begin(K, i) + tl.arange(0, operand_width(K, i))
        digits += (tl.load(q_at + c[:, None]),)
    unit = tl.load(UNITS + base * G + g)
    query, of_first = unit, unit
    if K.has("base"):
        d = tl.arange(0, K.dim)
        is_row = tl.broadcast_to((g < rows)[:, None], (G, K.dim))
        at = EXACT + base * rows * K.dim + (g * K.dim)[:, None] + d[None, :]
        query = tl.load(at, mask=is_row, other=0.0) * LOG2_E
        of_first = tl.load(FIRSTS + base * rows + g, mask=g < rows, other=0.0) * LOG2_E
    return digits, unit, query, of_first


@triton.jit
def trellis_scores(
    queries, fields, where, live, block, tiles, TABLE, K: tl.constexpr, NT: tl.constexpr,
    ORDER: tl.constexpr, KW: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """Return logits of base 2 `[N, G]`; parameters as of `key_scores`."""
    digits, unit, query, of_first = queries
    codes, scale, _ = fields
    words = key_words(codes, live, 0, K, ORDER)
    sums = tl.zeros([NT * 32, digits[0].shape[1]], tl.int32)
    # The longest table last: so fewer registers are taken at a time.
    for i in tl.static_range(len(K.steps)):
        k = key_levels(words, TABLE, K, len(K.steps) - 1 - i, KW, ASM)
        sums = tl.dot(k, digits[len(K.steps) - 1 - i], acc=sums, out_dtype=tl.int32)
    s = whole(sums) * (e5m3(load_per_token(scale, live, 0, ORDER))[:, None] * unit[None, :])
    if K.has("base"):
        flags = _units(where, where[3], K, "base") + where[4] * 2
        at_mean = of_first
        if K.has("mean"):
            at_mean = _of_mean(where, block * NT, tiles, query, K)
        s += _of_bases(_flags(flags, live, ORDER), of_first, at_mean, K)
    return s
