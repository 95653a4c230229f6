"""Attention over everything: packed and exact tokens of any format, in one online softmax.

Each program attends with some query rows of one KV head over a part of the tokens, in tiles of 32.
The parts are merged by `merge.py`.

Query rows of a KV head are numbered `g * q_len + i` (query i of the head's group g). A program's
rows are consecutive in `i * groups + g`, so that they see much the same tokens.

Over latents (`torch.latent`) keys are those of both streams, one after the other, and values those
of the first.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl

from kvpact.kernels.triton.attend.streams import (
    TILE,
    StreamForm,
    exact_tokens,
    has_exact,
    has_packed,
    packed_bases,
    packed_steps,
    packed_tokens,
    rounded,
)
from kvpact.kernels.triton.columns import (
    CAUSAL,
    FIRST_QUERY,
    HELD,
    MASK,
    NEW,
    PADDING,
    SKIP_FROM,
    SKIP_TO,
    WINDOW,
    count_of_row,
    of_row,
)
from kvpact.kernels.triton.slots import pointer_to


@triton.jit
def _product(a, b, sums, THRICE: tl.constexpr):
    """Return `a @ b + sums`: in fp32, or of numbers that are in tf32 already."""
    if THRICE:
        return tl.dot(a, b, sums, input_precision="tf32x3")
    return tl.dot(a, b, sums, input_precision="tf32")


@triton.jit
def _queries(Q, at_row, live, channel, there, STRIDE: tl.constexpr):
    """Return some channels of a program's queries, `[rows, channels]`."""
    at = (at_row.to(tl.int64) * STRIDE)[:, None] + channel[None, :]
    return tl.load(Q + at, mask=live[:, None] & there[None, :], other=0.0)


@triton.constexpr_function
def block_piece(stream: StreamForm, index: int) -> int:
    """Return how many channels of a block of a trellis are multiplied at a time."""
    assert stream.form is not None
    width = 1 << (stream.form.steps[index].dim - 1).bit_length()
    return min(max(width, 16), stream.key_piece)


@triton.jit
def _block_logits(
    logits, has, ROWS, row, head, QP, LEVELS, tile, at_row, live, STRIDE: tl.constexpr,
    INDEX: tl.constexpr, S: tl.constexpr,
):  # fmt: skip
    """Add the products of queries and a block of packed trellises."""
    BLOCK: tl.constexpr = S.form.steps[INDEX]
    PIECE: tl.constexpr = block_piece(S, INDEX)
    end = tl.where(has, BLOCK.dim, 0)
    for first in tl.range(0, end, PIECE, num_stages=1, disable_licm=True):
        step = first + tl.arange(0, PIECE)
        there, channel = step < BLOCK.dim, BLOCK.begin + step
        k = packed_steps(ROWS, row, head, LEVELS, tile, channel, there, INDEX, S)
        q = _queries(QP, at_row, live, channel, there, STRIDE)
        logits = _product(q, tl.trans(k), logits, S.thrice)
    return logits


@triton.jit
def _packed_logits(
    logits, ROWS, row, head, QP, QE, FIRST, LEVELS, tile, at_row, live, STRIDE: tl.constexpr,
    S: tl.constexpr,
):  # fmt: skip
    """Add the products of queries and packed keys."""
    has = has_packed(ROWS, row, tile, S)
    # No `if`: after one, compilers give each warp all of the logits, and work on them as often.
    end = tl.where(has, S.width, 0)
    if S.form.kind == "trellis":
        for index in tl.static_range(len(S.form.steps)):
            logits = _block_logits(
                logits, has, ROWS, row, head, QP, LEVELS, tile, at_row, live, STRIDE, index, S
            )
    else:
        for first in tl.range(0, end, S.key_piece, num_stages=1, disable_licm=True):
            channel = first + tl.arange(0, S.key_piece)
            k = packed_tokens(ROWS, row, head, LEVELS, tile, first, S.key_piece, S)
            q = _queries(QP, at_row, live, channel, channel < S.dim, STRIDE)
            logits = _product(q, tl.trans(k), logits, S.thrice)
    if S.form.has("base"):
        for first in tl.range(0, end, S.key_piece, num_stages=1, disable_licm=True):
            channel = first + tl.arange(0, S.key_piece)
            of_first = tl.load(FIRST + at_row, mask=live & (first == 0), other=0.0)
            q = _queries(QE, at_row, live, channel, channel < S.dim, STRIDE)
            logits += packed_bases(ROWS, row, head, tile, q, of_first, channel, S)
    return logits


@triton.jit
def add_logits(
    logits, ROWS, row, head, QP, QE, FIRST, LEVELS, tile, at_row, live, STRIDE: tl.constexpr,
    S: tl.constexpr,
):  # fmt: skip
    """Add the products of queries and a tile's keys to logits `[rows, 32]`.

    QP, QE, FIRST: as of `attend_general`, of a head, from the stream's first channel on. at_row:
    which of its queries rows have; live: whether there is one; STRIDE: from one of them to the
    next.
    """
    # Queries are loaded for each tile: held in registers, they would leave none for the rest.
    if S.form is not None:
        logits = _packed_logits(
            logits, ROWS, row, head, QP, QE, FIRST, LEVELS, tile, at_row, live, STRIDE, S
        )
    end = tl.where(has_exact(ROWS, row, tile, S), S.width, 0)
    for first in tl.range(0, end, S.key_piece, num_stages=1, disable_licm=True):
        channel = first + tl.arange(0, S.key_piece)
        k = exact_tokens(ROWS, row, head, tile, channel, S)
        q = _queries(QE, at_row, live, channel, channel < S.dim, STRIDE)
        logits = _product(q, tl.trans(k), logits, S.thrice)
    return logits


@triton.jit
def no_sums(COUNT: tl.constexpr, S: tl.constexpr):
    """Return sums of no values yet, `[COUNT, value_piece]` for each piece of channels."""
    sums = ()
    for _ in tl.static_range(S.width // S.value_piece):
        sums += (tl.full([COUNT, S.value_piece], 0.0, tl.float32),)
    return sums


@triton.jit
def times(sums, factor):
    """Return the sums times a factor of each row."""
    made = ()
    for i in tl.static_range(len(sums)):
        made += (sums[i] * factor[:, None],)
    return made


@triton.jit
def add_values(exact, packed, weights, ROWS, row, head, LEVELS, tile, S: tl.constexpr):
    """Add a tile's values by their weights `[rows, 32]` to two sums (see `no_sums`)."""
    PIECE: tl.constexpr = S.value_piece
    if S.form is not None:  # noqa: SIM102 (known when it is compiled; the other is not)
        if has_packed(ROWS, row, tile, S):
            made = ()
            for i in tl.static_range(len(packed)):
                v = packed_tokens(ROWS, row, head, LEVELS, tile, i * PIECE, PIECE, S)
                made += (_product(weights, v, packed[i], S.thrice),)
            packed = made
    if has_exact(ROWS, row, tile, S):
        made = ()
        for i in tl.static_range(len(exact)):
            v = exact_tokens(ROWS, row, head, tile, i * PIECE + tl.arange(0, PIECE), S)
            made += (_product(weights, v, exact[i], S.thrice),)
        exact = made
    return exact, packed


LOG2_E = tl.constexpr(1.4426950408889634)


@dataclass(frozen=True)
class Variant:
    """A compiled variant of the kernel; `latent`: over latents; `mask`: its type, or none: ""."""

    k: StreamForm
    v: StreamForm
    latent: bool
    rows: int
    softcap: bool
    mask: str
    warps: int

    @property
    def values(self) -> StreamForm:
        """The stream whose tokens are summed."""
        return self.k if self.latent else self.v

    @property
    def query_dim(self) -> int:
        """Channels of a query."""
        return self.k.dim + self.v.dim if self.latent else self.k.dim


@triton.jit
def _tanh(x):
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
def _tiles(ROWS, row, lowest, highest, part, splits):
    """Return which tiles a part has: the first and the last one, and those that are left out.

    Tiles are numbered without those from `gap` on that another kernel attends, `gap_size` of them.
    lowest, highest: positions of the first and the last query.
    """
    total = count_of_row(ROWS, row, HELD) + count_of_row(ROWS, row, NEW)
    first = tl.maximum(count_of_row(ROWS, row, PADDING), 0)
    first = tl.maximum(first, lowest - count_of_row(ROWS, row, WINDOW) + 1) // TILE
    last = tl.where(of_row(ROWS, row, CAUSAL) != 0, tl.minimum(total, highest + 1), total)
    last = tl.maximum((last + TILE - 1) // TILE, first)
    gap = (count_of_row(ROWS, row, SKIP_FROM) + TILE - 1) // TILE
    gap = tl.minimum(tl.maximum(gap, first), last)
    gap_size = tl.minimum(tl.maximum(count_of_row(ROWS, row, SKIP_TO) // TILE, gap), last) - gap
    last -= gap_size
    each = (last - first + splits - 1) // splits
    begin = first + part * each
    return begin, tl.minimum(begin + each, last), gap, gap_size


@triton.jit
def _seen(ROWS, row, tile, position):
    """Return which of a tile's tokens rows may see, but for masks: `[rows, 32]`."""
    tokens = tile * TILE + tl.arange(0, TILE)
    total = count_of_row(ROWS, row, HELD) + count_of_row(ROWS, row, NEW)
    skip_from, skip_to = count_of_row(ROWS, row, SKIP_FROM), count_of_row(ROWS, row, SKIP_TO)
    seen = (tokens >= count_of_row(ROWS, row, PADDING)) & (tokens < total)
    seen = seen & ~((tokens >= skip_from) & (tokens < skip_to))
    latest = tl.where(of_row(ROWS, row, CAUSAL) != 0, position, total)
    earliest = position - count_of_row(ROWS, row, WINDOW)
    seen = seen[None, :] & (tokens[None, :] <= latest[:, None])
    return seen & (tokens[None, :] > earliest[:, None])


@triton.jit
def _mask(ROWS, row, tile, query_head, query, seen, TYPE: tl.constexpr):
    """Return the mask's numbers, `[rows, 32]`; 0 where it is of no account."""
    tokens = tile * TILE + tl.arange(0, TILE)
    at = of_row(ROWS, row, MASK) + query_head * of_row(ROWS, row, MASK + 1)
    at = (at + query * of_row(ROWS, row, MASK + 2))[:, None]
    at += tokens[None, :] * of_row(ROWS, row, MASK + 3)
    return tl.load(at.to(pointer_to(TYPE)), mask=seen, other=0)


@triton.jit(do_not_specialize=["q_len", "groups", "heads", "splits", "parts", "softcap"])
def attend_general(
    ROWS, QP, QE, FIRST, K_LEVELS, V_LEVELS, PACKED, EXACT, LSE,
    q_len, groups, heads, splits, parts, softcap, VARIANT: tl.constexpr,
):  # fmt: skip
    """Attend with some rows over a part of the tokens. Grid: (row tiles * heads, splits, B).

    QP, QE: `[B, heads, groups * q_len, query_dim]` fp32, scaled; for packed and for exact tokens;
    rounded to tf32 unless products are those of fp32. FIRST: `[B, heads, groups * q_len]` fp32, the
    products with the first key, where that is a base of packed keys (see `trellis.bases`).
    PACKED: `[B, heads, parts, groups * q_len, dim of values]` fp32, still transformed; EXACT
    likewise with `splits` parts, as tokens were given. Both over the part's sum of weights, whose
    logarithm to base 2 is LSE, `[B, heads, parts, groups * q_len]`; -inf where no token was seen.
    """
    K: tl.constexpr = VARIANT.k
    V: tl.constexpr = VARIANT.v
    VALUES: tl.constexpr = VARIANT.values
    part, row = tl.program_id(1), tl.program_id(2)
    head, first_row = tl.program_id(0) % heads, tl.program_id(0) // heads * VARIANT.rows
    count = groups * q_len
    place = first_row + tl.arange(0, VARIANT.rows)
    live = place < count
    query, group = place // groups, place % groups
    at_row = group * q_len + query
    at_head = (row * heads + head).to(tl.int64)
    first_query = count_of_row(ROWS, row, FIRST_QUERY)
    begin, end, gap, gap_size = _tiles(
        ROWS, row, first_query + first_row // groups,
        first_query + tl.minimum(first_row + VARIANT.rows - 1, count - 1) // groups, part, splits,
    )  # fmt: skip
    QP += at_head * count * VARIANT.query_dim
    QE += at_head * count * VARIANT.query_dim
    FIRST += at_head * count

    peak = tl.full([VARIANT.rows], -float("inf"), tl.float32)
    weight = tl.full([VARIANT.rows], 0.0, tl.float32)
    exact, packed = no_sums(VARIANT.rows, VALUES), no_sums(VARIANT.rows, VALUES)
    for index in tl.range(begin, end, disable_licm=True):
        tile = tl.where(index >= gap, index + gap_size, index)
        logits = tl.full([VARIANT.rows, TILE], 0.0, tl.float32)
        logits = add_logits(
            logits, ROWS, row, head, QP, QE, FIRST, K_LEVELS, tile, at_row, live,
            VARIANT.query_dim, K,
        )  # fmt: skip
        if VARIANT.latent:
            logits = add_logits(
                logits, ROWS, row, head, QP + K.dim, QE + K.dim, FIRST, V_LEVELS, tile, at_row,
                live, VARIANT.query_dim, V,
            )  # fmt: skip
        if VARIANT.softcap:
            logits = _tanh(logits / softcap) * softcap
        seen = _seen(ROWS, row, tile, first_query + query) & live[:, None]
        if VARIANT.mask != "":
            mask = _mask(ROWS, row, tile, head * groups + group, query, seen, VARIANT.mask)
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
        if not VALUES.thrice:
            weights = rounded(weights)
        weight = weight * decay + tl.sum(weights, 1)
        peak = top
        exact, packed = add_values(
            times(exact, decay), times(packed, decay), weights, ROWS, row, head,
            K_LEVELS if VARIANT.latent else V_LEVELS, tile, VALUES,
        )  # fmt: skip

    safe = tl.where(weight == 0.0, 1.0, weight)
    exact_at = (at_head * splits + part) * count + at_row
    at = (at_head * parts + part) * count + at_row
    for i in tl.static_range(VALUES.width // VALUES.value_piece):
        channel = i * VALUES.value_piece + tl.arange(0, VALUES.value_piece)
        inside = live[:, None] & (channel < VALUES.dim)[None, :]
        place = exact_at[:, None] * VALUES.dim + channel[None, :]
        tl.store(EXACT + place, exact[i] / safe[:, None], inside)
        if VALUES.form is not None:
            place = at[:, None] * VALUES.dim + channel[None, :]
            tl.store(PACKED + place, packed[i] / safe[:, None], inside)
    tl.store(LSE + at, tl.where(weight == 0.0, -float("inf"), peak + tl.log2(safe)), live)
