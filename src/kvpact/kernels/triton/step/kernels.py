"""The kernels of a step besides attention; they read the tokens' places from the device.

Counts and addresses of each row stand in the table of `rows.py`. `take_tokens` writes down where
the new tokens lie, and `advance` (called by `merge_parts`) counts them, so that a step's launches
are the same each time: what a CUDA graph replays.
"""

from dataclasses import dataclass

import triton
import triton.language as tl

from kvpact.kernels.triton.columns import (
    COLUMNS,
    FIRST_QUERY,
    HELD,
    K_EXACT_FROM,
    K_TAIL,
    SKIP_FROM,
    SKIP_TO,
    V_EXACT_FROM,
    V_TAIL,
    WINDOW,
    SideColumns,
    count_of_row,
    of_row,
)
from kvpact.kernels.triton.encode.kernel import as_fp32, can_not_encode, encode_rows
from kvpact.kernels.triton.forms import SlotForm

_STRIDES = [f"{x}_{axis}" for x in "kvq" for axis in ("row", "head", "token")]
_COUNTS = [f"{side}_{what}" for side in "kv" for what in ("tiles", "segments")]
_COUNTS += ["flags_row", "new", "queries", "heads", "groups", "batch"]


@dataclass(frozen=True)
class Taking:
    """The constants with which a stream takes the new tokens of a step."""

    form: SlotForm
    at: SideColumns  # where it stands in the table of rows
    encodes: bool  # `take_tokens` encodes tokens as they come, one by one
    most: float  # magnitude of a number that the codec can hold
    longest: float  # and norm of a vector
    rows: int  # tokens that a program has at a time
    span: int  # positions that it has in all, see `encode_tokens`
    size: int  # bytes of a number of a token


@dataclass(frozen=True)
class Counting:
    """The counts to be made at the end of a step."""

    new: int
    fast: bool  # another kernel attends the packed tokens from SKIP_FROM to SKIP_TO
    k_window: int  # exact tokens that K keeps
    k_group: int  # tokens of K that are packed together
    v_window: int
    v_group: int


@triton.jit
def _keep(ROWS, x, row, head, position, live, d, S: tl.constexpr):
    """Copy tokens after the tail, which is in their dtype."""
    place = position - of_row(ROWS, row, S.at.exact_from) + tl.arange(0, S.rows)
    to = of_row(ROWS, row, S.at.tail) + head * of_row(ROWS, row, S.at.tail + 1)
    to = (to + place * of_row(ROWS, row, S.at.tail + 2)).to(tl.pointer_type(x.dtype))
    tl.store(to[:, None] + d[None, :], x, mask=live[:, None] & (d < S.form.dim)[None, :])


@triton.jit
def _can_not_hold(x, live, S: tl.constexpr):
    """Return whether a token has NaN, infinity or too large a number, or is too long."""
    good = (tl.abs(x) <= S.most) & (tl.abs(x) < float("inf"))
    good = (tl.min(good.to(tl.int32), 1) > 0) & (tl.sum(x * x, 1) <= S.longest * S.longest)
    return tl.max((live & ~good).to(tl.int32), 0)


@triton.jit
def _take(ROWS, good, keeps, x, slots, tables, row, head, new, S: tl.constexpr):
    """Take tokens of a stream, row and head at a program's positions; as of `encode_rows`."""
    X, x_row, x_head, x_token = x
    if (tl.program_id(0) == 0) & (head == 0):
        place = ROWS + row * COLUMNS + S.at.new
        tl.store(place, X.to(tl.int64) + row.to(tl.int64) * x_row * S.size)
        tl.store(place + 1, tl.cast(x_head, tl.int64) * S.size)
        tl.store(place + 2, tl.cast(x_token, tl.int64) * S.size)
    start, d = count_of_row(ROWS, row, HELD), tl.arange(0, S.form.padded)
    span = start // S.span + tl.program_id(0)
    low = tl.maximum(span * S.span, start) // S.rows * S.rows
    first = X + row.to(tl.int64) * x_row + head.to(tl.int64) * x_head
    for position in range(low, tl.minimum(span * S.span + S.span, start + new), S.rows):
        token = position - start + tl.arange(0, S.rows)
        live = (token >= 0) & (token < new)
        at = first + (token.to(tl.int64) * x_token)[:, None] + d[None, :]
        given = tl.load(at, mask=live[:, None] & (d < S.form.dim)[None, :], other=0.0)
        if keeps != 0:
            _keep(ROWS, given, row, head, position, live, d, S)
        numbers = as_fp32(given)
        bad = _can_not_hold(numbers, live, S)
        if S.form.limit != float("inf"):
            bad = bad | can_not_encode(numbers, live, tables, S.rows, S.form)
        tl.store(good, 0, mask=bad != 0)
        if S.encodes:
            encode_rows(x, slots, tables, row, head, position, start, new, S.rows, S.form)
            # Another thread may go on with the same words.
            if S.span != S.rows:
                tl.debug_barrier()


@triton.jit
def _check_queries(
    good, Q, q_row, q_head, q_token, queries, groups, head, row,
    Q_DIM: tl.constexpr, Q_WIDTH: tl.constexpr,
):  # fmt: skip
    """Look for what no query holds in a program's share of those of a row and KV head."""
    d = tl.arange(0, Q_WIDTH)
    first = Q + row.to(tl.int64) * q_row + head.to(tl.int64) * groups * q_head + d
    for index in range(tl.program_id(0), groups * queries, tl.num_programs(0)):
        at = (index // queries).to(tl.int64) * q_head + (index % queries).to(tl.int64) * q_token
        x = as_fp32(tl.load(first + at, mask=d < Q_DIM, other=0.0))
        bad = tl.max((~(tl.abs(x) < 1e31)).to(tl.int32), 0)
        tl.store(good, 0, mask=bad != 0)


@triton.jit(do_not_specialize=[*_STRIDES, *_COUNTS])
def take_tokens(
    ROWS, FLAGS, flags_row, K, V, Q,
    k_row, k_head, k_token, v_row, v_head, v_token, q_row, q_head, q_token,
    K_TABLE, K_HEADS, K_SIGNS, K_BOUNDARIES, K_LEVELS, k_tiles, k_segments,
    V_TABLE, V_HEADS, V_SIGNS, V_BOUNDARIES, V_LEVELS, v_tiles, v_segments,
    new, queries, heads, groups, batch,
    K_SIDE: tl.constexpr, V_SIDE: tl.constexpr, Q_DIM: tl.constexpr, Q_WIDTH: tl.constexpr,
):  # fmt: skip
    """Write down where new tokens lie, check, keep and encode them; check the queries.

    Grid: (spans that the tokens may be in, 3 * heads, B): for K, for V and for the queries.

    `ROWS`: see `columns`; HELD says where the new tokens stand. `FLAGS`, `flags_row`: `[B, 3]`
    int64: the address of each row's flag, int8, which becomes 0 where a number can't be stored;
    whether K and V are kept. Numbers from one row to the next. `K`, `V`, `Q`: the tokens and
    queries, with strides in numbers. `K_TABLE`, `K_HEADS`, `k_segments`, `k_tiles`: as of
    `encode_tokens`, and so V's. `K_SIGNS`, `K_BOUNDARIES`, `K_LEVELS`: see `Slots`; and V's.
    `new`, `queries`, `heads`, `groups`, `batch`: new tokens and queries of a row, KV heads, query
    heads of one, rows. `K_SIDE`, `V_SIDE`: how they are taken: `Taking`. `Q_DIM`, `Q_WIDTH`:
    channels of a query, and the same padded to a power of two.
    """
    side, head, row = tl.program_id(1) // heads, tl.program_id(1) % heads, tl.program_id(2)
    FLAGS += row * flags_row
    good = tl.load(FLAGS).to(tl.pointer_type(tl.int8))
    if side == 0:
        _take(
            ROWS, good, tl.load(FLAGS + 1), (K, k_row, k_head, k_token),
            (K_TABLE, K_HEADS, row, head, batch, k_segments, k_tiles),
            (K_SIGNS, K_BOUNDARIES, K_LEVELS), row, head, new, K_SIDE,
        )  # fmt: skip
    elif side == 1:
        _take(
            ROWS, good, tl.load(FLAGS + 2), (V, v_row, v_head, v_token),
            (V_TABLE, V_HEADS, row, head, batch, v_segments, v_tiles),
            (V_SIGNS, V_BOUNDARIES, V_LEVELS), row, head, new, V_SIDE,
        )  # fmt: skip
    else:
        _check_queries(good, Q, q_row, q_head, q_token, queries, groups, head, row, Q_DIM, Q_WIDTH)


@triton.jit
def _count(ROWS, row, held, window, group, EXACT_FROM: tl.constexpr, TAIL: tl.constexpr):
    """Let a stream's tail begin where it does with so many tokens held, unless they wait."""
    before = of_row(ROWS, row, EXACT_FROM)
    now = tl.minimum(held - held % group, tl.maximum(held - window, 0))
    now = tl.where(window < 0, before, tl.maximum(before, now))
    tail = of_row(ROWS, row, TAIL) + (now - before) * of_row(ROWS, row, TAIL + 2)
    tl.store(ROWS + row * COLUMNS + TAIL, tail)
    tl.store(ROWS + row * COLUMNS + EXACT_FROM, now)


@triton.jit
def advance(ROWS, row, COUNTING: tl.constexpr):
    """Count the new tokens of a row; one program of a launch that reads no counts does it."""
    held = of_row(ROWS, row, HELD) + COUNTING.new
    _count(ROWS, row, held, COUNTING.k_window, COUNTING.k_group, K_EXACT_FROM, K_TAIL)
    _count(ROWS, row, held, COUNTING.v_window, COUNTING.v_group, V_EXACT_FROM, V_TAIL)
    tl.store(ROWS + row * COLUMNS + HELD, held)
    query = of_row(ROWS, row, FIRST_QUERY) + COUNTING.new
    tl.store(ROWS + row * COLUMNS + FIRST_QUERY, query)
    if COUNTING.fast:
        first = tl.maximum(of_row(ROWS, row, SKIP_FROM), query - of_row(ROWS, row, WINDOW) + 1)
        last = tl.minimum(of_row(ROWS, row, K_EXACT_FROM), of_row(ROWS, row, V_EXACT_FROM))
        tl.store(ROWS + row * COLUMNS + SKIP_FROM, first)
        tl.store(ROWS + row * COLUMNS + SKIP_TO, tl.minimum(last, query + 1))
