"""Means of the keys of groups, and the base of each key: `methods.bases` on the device.

A program has a group of one row and head. Tokens are taken 32 at a time where distances are added
up, and channels 32 at a time where means are; in between, what was found lies in memory.
"""

import triton
import triton.language as tl

from kvpact.kernels.triton.encode.kernel import as_fp32
from kvpact.kernels.triton.encode.trellis_kernels import store_flags
from kvpact.kernels.triton.slots import segment_at, units_of
from kvpact.kernels.triton.transforms import tree_sum
from kvpact.kernels.triton.trellis.numbers import chosen_bases, distance

CHANNELS = tl.constexpr(32)  # channels whose means are computed at a time
STEPS = tl.constexpr(127.0)


@triton.jit
def _tokens(X, x_token, first, weight, chunk, FORM: tl.constexpr):
    """Return 32 tokens, and their distances to nothing and to the first key."""
    token, d = chunk * 32 + tl.arange(0, 32), tl.arange(0, FORM.padded)
    inside = tl.broadcast_to((d < FORM.dim)[None, :], (32, FORM.padded))
    at = X + (token.to(tl.int64) * x_token)[:, None] + d[None, :]
    x = as_fp32(tl.load(at, mask=inside, other=0.0))
    far = distance(x, weight, FORM)
    to_first = far
    if FORM.trellis.first:
        to_first = distance(x - first[None, :], weight, FORM)
    return x, far, to_first


@triton.jit
def _whole(mean, size):
    """Return means in whole steps, halves to the even one."""
    safe = tl.where(size == 0.0, 1.0, size)
    steps = tl.div_rn(mean, tl.zeros_like(mean) + safe)
    steps = tl.minimum(tl.maximum(steps, -2.0 * STEPS), 2.0 * STEPS)
    # Numbers of this size have no fractions, so the sum is rounded.
    steps = (steps + 12582912.0) - 12582912.0
    steps = tl.minimum(tl.maximum(steps, -STEPS), STEPS)
    return tl.where(size == 0.0, 0.0, steps)


@triton.jit
def _mean_of_those_inside(X, x_token, MEANS, INSIDE, FORM: tl.constexpr):
    """Store the means of the group's tokens that are inside, and return their step, fp16."""
    GROUP: tl.constexpr = FORM.trellis.center
    token = tl.arange(0, GROUP)
    inside = tl.load(INSIDE + token) != 0
    count = tl.maximum(tl.sum(inside.to(tl.int32), 0), 1).to(tl.float32)
    most = count * 0.0
    for first in range(0, FORM.dim, CHANNELS):
        channel = first + tl.arange(0, CHANNELS)
        there = tl.broadcast_to((channel < FORM.dim)[:, None], (CHANNELS, GROUP))
        at = X + (token.to(tl.int64) * x_token)[None, :] + channel[:, None]
        x = as_fp32(tl.load(at, mask=there, other=0.0))
        total = tree_sum(tl.where(inside[None, :], x, 0.0), CHANNELS, GROUP, GROUP)
        mean = tl.div_rn(total, tl.zeros_like(total) + count)
        tl.store(MEANS + channel, mean, mask=channel < FORM.dim)
        most = tl.maximum(most, tl.max(tl.abs(mean), 0))
    tl.debug_barrier()  # what one thread stored others load
    return tl.div_rn(most, most * 0.0 + STEPS).to(tl.float16)


@triton.jit(do_not_specialize=["start", "tiles_per_segment", "batch", "segments"])
def choose_bases(
    X, x_row, x_head, x_token, TABLE, HEADS, WEIGHT, FIRST_KEY, MEANS, INSIDE,
    start, tiles_per_segment, batch, segments, FORM: tl.constexpr,
):  # fmt: skip
    """Store a group's mean, and each token's base: a program for every group, head and row.

    `WEIGHT`, `FIRST_KEY`: as in `KeyTables`; `MEANS`, `INSIDE`: `[B, heads, groups, channels]` fp32
    and `[B, heads, groups, tokens of one]` int8, of no account; all else: as of `encode_groups`.
    """
    GROUP: tl.constexpr = FORM.trellis.center
    group, head, row = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    own = (row.to(tl.int64) * tl.num_programs(1) + head) * tl.num_programs(0) + group
    MEANS += own * FORM.dim
    INSIDE += own * GROUP
    X += tl.cast(row, tl.int64) * x_row + tl.cast(head, tl.int64) * x_head
    X += group.to(tl.int64) * GROUP * x_token
    lane, d = tl.arange(0, 32), tl.arange(0, FORM.padded)
    there = d < FORM.dim
    weight = tl.load(WEIGHT + head * FORM.dim + d, mask=there, other=0.0)
    first = tl.load(FIRST_KEY + head * FORM.dim + d, mask=there, other=0.0)

    tl.store(INSIDE + tl.arange(0, GROUP), tl.full([GROUP], 1, tl.int8))
    tl.debug_barrier()
    size = _mean_of_those_inside(X, x_token, MEANS, INSIDE, FORM).to(tl.float32)
    guess = _whole(tl.load(MEANS + d, mask=there, other=0.0), size) * size
    for chunk in range(GROUP // 32):
        x, far, to_first = _tokens(X, x_token, first, weight, chunk, FORM)
        to_mean = distance(x - guess[None, :], weight, FORM)
        near = to_mean < far
        if FORM.trellis.first:
            near = near & (to_mean < to_first)
        tl.store(INSIDE + chunk * 32 + lane, near.to(tl.int8))
    tl.debug_barrier()
    step = _mean_of_those_inside(X, x_token, MEANS, INSIDE, FORM)
    size = step.to(tl.float32)
    whole = _whole(tl.load(MEANS + d, mask=there, other=0.0), size)

    slots = (TABLE, HEADS, row, head, batch, segments, tiles_per_segment)
    segment, tile = segment_at(slots, (start + group * GROUP) // 32)
    unit = tile * 32 // GROUP
    means = units_of("mean", segment, FORM)
    tl.store(means + unit * FORM.dim + d, whole.to(tl.int8), mask=there)
    steps = units_of("step", segment, FORM)
    tl.store(steps + unit, step)
    flags = units_of("base", segment, FORM)
    mean = whole * size
    for chunk in range(GROUP // 32):
        x, far, to_first = _tokens(X, x_token, first, weight, chunk, FORM)
        flag = chosen_bases(far, to_first, distance(x - mean[None, :], weight, FORM))
        store_flags(flags, tile + chunk, flag, lane >= 0)
