"""KVarN's balance of a tile of tokens, and the grids of its rows (see `methods.kvarn`).

One program balances a tile. The tile and what it is divided by lie in memory of the program's own,
in the order of its tokens; deviations of tokens and of channels are taken in turn, some at a time.
Threads read there what others wrote, so a barrier follows whatever is stored.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kvpact.kernels.triton.encode_deviations import (
    balanced_channels,
    balanced_tokens,
    by_count,
    channel_deviations,
    divided,
    flat_mean,
    normalised,
    token_deviations,
    within,
)
from kvpact.kernels.triton.slots import units_of
from kvpact.methods import kvarn

VECTORS = 6
"""Vectors of one number per token or channel that a program keeps beside the tile."""

_SWEEPS = tl.constexpr(kvarn.SWEEPS)
_STD_MIN, _STD_MAX = tl.constexpr(kvarn.STD_MIN), tl.constexpr(kvarn.STD_MAX)
_SCALE_MIN, _SCALE_MAX = tl.constexpr(kvarn.SCALE_MIN), tl.constexpr(kvarn.SCALE_MAX)
_UNIT_MIN = tl.constexpr(kvarn.UNIT_MIN)


@triton.jit
def _numbers(X, COUNT: tl.constexpr, PADDED: tl.constexpr):
    """Return a vector; 1 behind its end."""
    i = tl.arange(0, PADDED)
    return tl.load(X + i, mask=i < COUNT, other=1.0)


@triton.jit
def _put(X, x, COUNT: tl.constexpr, PADDED: tl.constexpr):
    i = tl.arange(0, PADDED)
    tl.store(X + i, x, mask=i < COUNT)


@triton.jit
def _grown(scale, DEVIATIONS, COUNT: tl.constexpr, PADDED: tl.constexpr):
    step = within(_numbers(DEVIATIONS, COUNT, PADDED), _STD_MIN, _STD_MAX)
    return within(scale * step, _SCALE_MIN, _SCALE_MAX)


@triton.jit
def _spread(DEVIATIONS, COUNT: tl.constexpr, PADDED: tl.constexpr):
    there = tl.arange(0, PADDED) < COUNT
    x = within(_numbers(DEVIATIONS, COUNT, PADDED), _STD_MIN, _STD_MAX)
    high, low = tl.max(tl.where(there, x, 0.0), 0), tl.min(tl.where(there, x, float("inf")), 0)
    return tl.div_rn(high, low)


@triton.jit
def _balance(
    X, BY_TOKEN, BY_CHANNEL, OF_TOKENS, OF_CHANNELS,
    ROWS: tl.constexpr, CHANNELS: tl.constexpr, FORM: tl.constexpr,
):  # fmt: skip
    """Find what evens out the deviations of a tile's tokens and channels, each a vector.

    Vectors in memory: what the tile is divided by, and deviations.
    """
    TOKENS: tl.constexpr = FORM.group
    DIM: tl.constexpr = FORM.dim
    PADDED: tl.constexpr = FORM.padded
    KEYS: tl.constexpr = FORM.order == "token"
    by_token = tl.full((TOKENS,), 1.0, tl.float32)
    by_channel = tl.full((PADDED,), 1.0, tl.float32)
    best_token, best_channel, best = by_token, by_channel, tl.full((1,), float("inf"), tl.float32)
    _put(BY_TOKEN, by_token, TOKENS, TOKENS)
    _put(BY_CHANNEL, by_channel, DIM, PADDED)
    tl.debug_barrier()
    if KEYS:
        token_deviations(X, BY_TOKEN, BY_CHANNEL, OF_TOKENS, ROWS, FORM)
    else:
        channel_deviations(X, BY_TOKEN, BY_CHANNEL, OF_CHANNELS, CHANNELS, FORM)
    tl.debug_barrier()
    for _ in range(_SWEEPS):
        for half in tl.static_range(2):
            if (half == 0) == KEYS:
                by_token = _grown(by_token, OF_TOKENS, TOKENS, TOKENS)
                _put(BY_TOKEN, by_token, TOKENS, TOKENS)
            else:
                by_channel = _grown(by_channel, OF_CHANNELS, DIM, PADDED)
                _put(BY_CHANNEL, by_channel, DIM, PADDED)
            tl.debug_barrier()
            # Rows after columns have grown; then both, for what is left uneven.
            if half == 1 or not KEYS:
                token_deviations(X, BY_TOKEN, BY_CHANNEL, OF_TOKENS, ROWS, FORM)
            if half == 1 or KEYS:
                channel_deviations(X, BY_TOKEN, BY_CHANNEL, OF_CHANNELS, CHANNELS, FORM)
            tl.debug_barrier()
        uneven = _spread(OF_TOKENS, TOKENS, TOKENS) + _spread(OF_CHANNELS, DIM, PADDED)
        better = uneven < best
        best = tl.where(better, uneven, best)
        best_token = tl.where(better, by_token, best_token)
        best_channel = tl.where(better, by_channel, best_channel)
        tl.debug_barrier()
    return best_token, best_channel


@triton.jit
def _row_ends(
    Y, BY_TOKEN, BY_CHANNEL, LOW, HIGH,
    ROWS: tl.constexpr, CHANNELS: tl.constexpr, FORM: tl.constexpr,
):  # fmt: skip
    """Store the least and the largest number of each row of the balanced tile."""
    if FORM.order == "token":
        for first in range(0, FORM.dim, CHANNELS):
            x = balanced_channels(Y, BY_TOKEN, BY_CHANNEL, first, CHANNELS, FORM)
            d = first + tl.arange(0, CHANNELS)
            tl.store(LOW + d, tl.min(x, 1), mask=d < FORM.dim)
            tl.store(HIGH + d, tl.max(x, 1), mask=d < FORM.dim)
    else:
        inside = (tl.arange(0, FORM.padded) < FORM.dim)[None, :]
        for first in range(0, FORM.group, ROWS):
            x = balanced_tokens(Y, BY_TOKEN, BY_CHANNEL, first, ROWS, FORM)
            t = first + tl.arange(0, ROWS)
            tl.store(LOW + t, tl.min(tl.where(inside, x, float("inf")), 1))
            tl.store(HIGH + t, tl.max(tl.where(inside, x, float("-inf")), 1))
    tl.debug_barrier()


@triton.jit
def _row_grids(LOW, HIGH, row, COUNT: tl.constexpr, PADDED: tl.constexpr, FORM: tl.constexpr):
    """Return scale and zero of rows, fp16, whose balance is `row`."""
    low, high = _numbers(LOW, COUNT, PADDED), _numbers(HIGH, COUNT, PADDED)
    spread = tl.where(high > low, high - low, 0.0)
    scale, zero = row * by_count(spread, (1 << FORM.bits) - 1), row * low
    return scale.to(tl.float16), tl.where(zero == 0.0, 0.0, zero).to(tl.float16)


@triton.jit
def _unit_of(most):
    """Return the power of two above a magnitude, within `UNIT_MIN` and 1."""
    above = (most.to(tl.int32, bitcast=True) >> 23) + 1
    return within((above << 23).to(tl.float32, bitcast=True), _UNIT_MIN, 1.0)


@triton.jit(do_not_specialize=["tokens", "start", "tiles_per_segment", "batch", "segments"])
def balance_tiles(
    Y, SCRATCH, TABLE, HEADS, tokens, start, tiles_per_segment, batch, segments,
    ROWS: tl.constexpr, CHANNELS: tl.constexpr, SPACE: tl.constexpr, FORM: tl.constexpr,
):  # fmt: skip
    """Balance a group of tokens of one row and head; store balance, scales and zeros.

    The grid has a program for every group, head and row.

    `Y`: rotated tokens `[rows, heads, tokens, dim]`, fp32; `SCRATCH`: fp32,
    `dim * group + VECTORS * SPACE` numbers for each program; `TABLE`, `HEADS`, `batch`, `segments`,
    `start`, `tiles_per_segment`: as of `encode_tokens`; `ROWS`, `CHANNELS`: tokens, and channels,
    that are worked on at a time.
    """
    group, head, row = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    pair = row.to(tl.int64) * tl.num_programs(1) + head
    Y += (pair * tokens + group * FORM.group) * FORM.dim
    SIZE: tl.constexpr = FORM.dim * FORM.group
    X = SCRATCH + (pair * tl.num_programs(0) + group) * (SIZE + 6 * SPACE)
    BY_TOKEN, BY_CHANNEL = X + SIZE, X + (SIZE + SPACE)
    OF_TOKENS, OF_CHANNELS = X + (SIZE + 2 * SPACE), X + (SIZE + 3 * SPACE)
    LOW, HIGH = X + (SIZE + 4 * SPACE), X + (SIZE + 5 * SPACE)

    mean = flat_mean(Y, X, 0.0, False, ROWS, FORM)
    tl.debug_barrier()
    whole = tl.sqrt_rn(flat_mean(Y, X, mean, True, ROWS, FORM))
    whole = tl.where(whole == 0.0, 1.0, whole)
    tl.debug_barrier()
    most = normalised(Y, X, whole, ROWS, FORM)
    tl.debug_barrier()
    by_token, by_channel = _balance(
        X, BY_TOKEN, BY_CHANNEL, OF_TOKENS, OF_CHANNELS, ROWS, CHANNELS, FORM
    )

    TOKENS: tl.constexpr = FORM.group
    DIM: tl.constexpr = FORM.dim
    PADDED: tl.constexpr = FORM.padded
    position = start + group * TOKENS
    segment, tile = position // 32 // tiles_per_segment, position // 32 % tiles_per_segment
    t, d = tl.arange(0, TOKENS), tl.arange(0, PADDED)
    of_token, of_group = tile * 32 + t, tile * 32 // TOKENS * DIM + d
    balances = units_of("balance", TABLE, HEADS, row, head, segment, batch, segments, FORM)
    scales = units_of("scale", TABLE, HEADS, row, head, segment, batch, segments, FORM)
    zeros = units_of("zero", TABLE, HEADS, row, head, segment, batch, segments, FORM)
    if FORM.order == "token":
        unit = _unit_of(most)
        by_channel = divided(by_channel * whole, unit)
        column = (by_token * unit).to(tl.float16)
        _put(BY_TOKEN, column.to(tl.float32), TOKENS, TOKENS)
        _put(BY_CHANNEL, by_channel, DIM, PADDED)
        tl.debug_barrier()
        _row_ends(Y, BY_TOKEN, BY_CHANNEL, LOW, HIGH, ROWS, CHANNELS, FORM)
        scale, zero = _row_grids(LOW, HIGH, by_channel, DIM, PADDED, FORM)
        # A tile of zeros gets a grid too: tokens that follow after a rollback need one.
        empty = most < _UNIT_MIN
        scale = tl.where(empty, (2.0 / ((1 << FORM.bits) - 1)), scale.to(tl.float32))
        tl.store(scales + of_group, scale.to(tl.float16), mask=d < DIM)
        zero = tl.where(empty, -1.0, zero.to(tl.float32))
        tl.store(zeros + of_group, zero.to(tl.float16), mask=d < DIM)
        tl.store(balances + of_token, tl.where(empty, 0.0, column.to(tl.float32)).to(tl.float16))
    else:
        by_token = by_token * whole
        column = by_channel.to(tl.float16)
        _put(BY_TOKEN, by_token, TOKENS, TOKENS)
        _put(BY_CHANNEL, column.to(tl.float32), DIM, PADDED)
        tl.debug_barrier()
        _row_ends(Y, BY_TOKEN, BY_CHANNEL, LOW, HIGH, ROWS, CHANNELS, FORM)
        scale, zero = _row_grids(LOW, HIGH, by_token, TOKENS, TOKENS, FORM)
        tl.store(scales + of_token, scale)
        tl.store(zeros + of_token, zero)
        tl.store(balances + of_group, column, mask=d < DIM)
