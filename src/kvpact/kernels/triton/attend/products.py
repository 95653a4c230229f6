"""Products of attention: queries and keys, weights and values, by pieces of channels.

A piece is decoded, multiplied, forgotten: whole tiles of wide vectors do not fit into registers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

from kvpact.kernels.triton.attend.streams import (
    exact_tokens,
    has_exact,
    has_packed,
    packed_bases,
    packed_steps,
    packed_tokens,
)

if TYPE_CHECKING:
    from kvpact.kernels.triton.attend.streams import StreamForm


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
    # No `if`: behind one, compilers give each warp all of the logits, and work on them as often.
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
