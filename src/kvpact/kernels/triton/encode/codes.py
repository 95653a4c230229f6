"""Codes, scales and zeros of tokens: the arithmetic of `kvpact.quantizers`, to the bit.

Tiles are fp32 `[ROWS, padded]`, 0 after the last channel; side information is fp16
`[ROWS, groups of channels]`. Launch kernels that use this with ``enable_fp_fusion=False``.
"""

import triton
import triton.language as tl

from kvpact.kernels.triton.transforms import tree_sum

_ROUNDING = tl.constexpr(12582912.0)
"""1.5 * 2**23: what is added to it loses its fractions, ties to even."""
_ROUNDING_BITS = tl.constexpr(0x4B400000)


@triton.jit
def reciprocal(x):
    """Return `1 / x`, or 0 where that is no number."""
    x = tl.where(x == 0.0, float("inf"), x)
    inverse = tl.div_rn(tl.full(x.shape, 1.0, tl.float32), x)
    return tl.where(tl.abs(inverse) == float("inf"), 0.0, inverse)


@triton.jit
def on_grid(x, zero, inverse, MOST: tl.constexpr):
    """Return `((x - zero) * inverse).round()`, within 0 … MOST, int32."""
    steps = (x - zero) * inverse
    steps = tl.minimum(tl.maximum(steps, -1.0), 256.0)
    code = (steps + _ROUNDING).to(tl.int32, bitcast=True) - _ROUNDING_BITS
    return tl.minimum(tl.maximum(code, 0), MOST)


@triton.jit
def grid_between(low, high, BITS: tl.constexpr):
    """Return scale and zero, fp16, that span numbers from `low` to `high`; a zero has no sign."""
    spread = tl.where(high > low, high - low, 0.0)
    steps = tl.full(spread.shape, (1 << BITS) - 1, tl.float32)
    return tl.div_rn(spread, steps).to(tl.float16), tl.where(low == 0.0, 0.0, low).to(tl.float16)


@triton.jit
def codebook(y, BOUNDARIES, LEVELS, ROWS: tl.constexpr, FORM: tl.constexpr):
    """Return codes, int32, and the scale of each token, fp16.

    `y`: rotated tokens, less their mean; `BOUNDARIES`, `LEVELS`: `[2**bits - 1]` and `[2**bits]`
    fp32.
    """
    energy = tree_sum(y * y, ROWS, FORM.padded, FORM.dim)
    norm = tl.sqrt_rn(energy)
    one = tl.full((ROWS,), 1.0, tl.float32)
    factor = tl.div_rn(one, tl.where(norm == 0.0, one, norm)) * FORM.root
    x = y * factor[:, None]
    codes = tl.full((ROWS, FORM.padded), 0, tl.int32)
    BITS: tl.constexpr = FORM.bits
    for i in tl.static_range(BITS):
        bound = tl.load(BOUNDARIES + codes + ((1 << (BITS - 1 - i)) - 1))
        codes += tl.where(x > bound, 1 << (BITS - 1 - i), 0)
    if FORM.rule == "l2":
        scale = tl.div_rn(norm, tl.full((ROWS,), FORM.root, tl.float32))
    else:
        levels = tl.load(LEVELS + codes)
        product = tree_sum(levels * y, ROWS, FORM.padded, FORM.dim)
        if FORM.rule == "ls":
            squares = tree_sum(levels * levels, ROWS, FORM.padded, FORM.dim)
            scale = tl.div_rn(product, squares)
        else:
            scale = tl.where(product == 0.0, 0.0, tl.div_rn(energy, product))
    return codes, scale.to(tl.float16)


@triton.jit
def _symmetric_scale(x, there, CHANNELS: tl.constexpr, BITS: tl.constexpr):
    """Return the scale, fp32, of the last axis of `[…, …, CHANNELS]` numbers where they are."""
    bits = x.to(tl.int32, bitcast=True)
    size = tl.where(there, bits & 0x7FFFFFFF, -1)
    most = tl.max(size, 2)
    if BITS == 8:
        extreme = most.to(tl.float32, bitcast=True)
        count = tl.full(extreme.shape, 127.0, tl.float32)
    else:
        place = tl.arange(0, CHANNELS)[None, None, :]
        first = tl.min(tl.where(size == most[:, :, None], place, CHANNELS), 2)
        negative = tl.max(tl.where(place == first[:, :, None], (bits < 0).to(tl.int32), 0), 2)
        extreme = (most | (negative << 31)).to(tl.float32, bitcast=True)
        count = tl.full(extreme.shape, -(1 << (BITS - 1)), tl.float32)
    return tl.div_rn(extreme, count)


@triton.jit
def _symmetric_codes(x, inverse, BITS: tl.constexpr):
    """Return codes, int32: ties away from zero with 8 bits, half a step up with fewer."""
    x = x * inverse
    OFFSET: tl.constexpr = 1 << (BITS - 1)
    if BITS == 8:
        size = tl.abs(x)
        whole = tl.floor(size)
        near = whole + tl.floor(2 * (size - whole))
        code = tl.where(x < 0.0, -near, near) + 128.0
    else:
        code = x + (OFFSET + 0.5)
    return tl.minimum(tl.maximum(code, 0.0), 2 * OFFSET - 1.0).to(tl.int32)


@triton.jit
def _ends(x, there):
    """Return the least and the largest number of the last axis of `[…, …, …]`."""
    low = tl.min(tl.where(there, x, float("inf")), 2)
    return low, tl.max(tl.where(there, x, float("-inf")), 2)


@triton.jit
def _spread_out(x, ROWS: tl.constexpr, FORM: tl.constexpr):
    """Return numbers of groups `[ROWS, groups]` for each channel."""
    GROUPS: tl.constexpr = FORM.padded_groups
    WIDTH: tl.constexpr = FORM.group_width
    return tl.broadcast_to(x[:, :, None], (ROWS, GROUPS, WIDTH)).reshape(ROWS, FORM.padded)


@triton.jit
def _members(group, FORM: tl.constexpr):
    """Return `[1, 1, padded]`: which channels are in a group."""
    d = tl.arange(0, FORM.padded)[None, None, :]
    return (d // FORM.channels == group) & (d < FORM.dim)


@triton.jit
def symmetric(x, ROWS: tl.constexpr, FORM: tl.constexpr):
    """Return codes, int32, and the scale of each token and group of channels, fp16."""
    GROUPS: tl.constexpr = FORM.padded_groups
    if FORM.even:
        WIDTH: tl.constexpr = FORM.group_width
        there = (tl.arange(0, FORM.padded) < FORM.dim).reshape(1, GROUPS, WIDTH)
        scale = _symmetric_scale(x.reshape(ROWS, GROUPS, WIDTH), there, WIDTH, FORM.bits)
        inverse = _spread_out(reciprocal(scale), ROWS, FORM)
    else:
        scale = tl.zeros((ROWS, GROUPS), tl.float32)
        inverse = tl.full((ROWS, FORM.padded), 0.0, tl.float32)
        for group in range(FORM.groups):
            there = _members(group, FORM)
            found = _symmetric_scale(x[:, None, :], there, FORM.padded, FORM.bits)
            scale = tl.where((tl.arange(0, GROUPS) == group)[None, :], found, scale)
            inverse = tl.where(there.reshape(1, FORM.padded), reciprocal(found), inverse)
    return _symmetric_codes(x, inverse, FORM.bits), scale.to(tl.float16)


@triton.jit
def affine(x, ROWS: tl.constexpr, FORM: tl.constexpr):
    """Return codes, int32, scale and zero of each token and group of channels, fp16."""
    GROUPS: tl.constexpr = FORM.padded_groups
    if FORM.even:
        WIDTH: tl.constexpr = FORM.group_width
        there = (tl.arange(0, FORM.padded) < FORM.dim).reshape(1, GROUPS, WIDTH)
        low, high = _ends(x.reshape(ROWS, GROUPS, WIDTH), there)
        scale, zero = grid_between(low, high, FORM.bits)
        inverse = _spread_out(reciprocal(scale.to(tl.float32)), ROWS, FORM)
        zeros = _spread_out(zero.to(tl.float32), ROWS, FORM)
    else:
        scale = tl.zeros((ROWS, GROUPS), tl.float16)
        zero = tl.zeros((ROWS, GROUPS), tl.float16)
        inverse = tl.full((ROWS, FORM.padded), 0.0, tl.float32)
        zeros = tl.full((ROWS, FORM.padded), 0.0, tl.float32)
        for group in range(FORM.groups):
            there = _members(group, FORM)
            low, high = _ends(x[:, None, :], there)
            step, begin = grid_between(low, high, FORM.bits)
            here = (tl.arange(0, GROUPS) == group)[None, :]
            scale, zero = tl.where(here, step, scale), tl.where(here, begin, zero)
            inside = there.reshape(1, FORM.padded)
            inverse = tl.where(inside, reciprocal(step.to(tl.float32)), inverse)
            zeros = tl.where(inside, begin.to(tl.float32), zeros)
    return on_grid(x, zeros, inverse, (1 << FORM.bits) - 1), scale, zero


@triton.jit
def float8(x, ROWS: tl.constexpr, FORM: tl.constexpr):
    """Return bytes, int32, and tokens' scales, fp16; by hand, as not all GPUs convert to e4m3."""
    MANTISSA: tl.constexpr = 2 if FORM.levels.number == "e5m2" else 3
    BIAS: tl.constexpr = 15 if FORM.levels.number == "e5m2" else 7
    LIMIT: tl.constexpr = 57344.0 if FORM.levels.number == "e5m2" else 448.0
    DROP: tl.constexpr = 23 - MANTISSA
    # What is added to a number below the normal ones has its last place where theirs is.
    UNIT: tl.constexpr = (127 + DROP + 1 - BIAS) << 23
    most = tl.max(tl.abs(x), 1)
    scale = tl.div_rn(most, tl.full((ROWS,), LIMIT, tl.float32)).to(tl.float16)
    if FORM.has("scale"):
        safe = tl.where(scale == 0.0, 1.0, scale.to(tl.float32))
        x = tl.div_rn(x, tl.broadcast_to(safe[:, None], (ROWS, FORM.padded)))
    x = tl.minimum(tl.maximum(x, -LIMIT), LIMIT)
    bits = x.to(tl.int32, bitcast=True)
    size = bits & 0x7FFFFFFF
    unit = tl.full(size.shape, UNIT, tl.int32).to(tl.float32, bitcast=True)
    small = (size.to(tl.float32, bitcast=True) + unit).to(tl.int32, bitcast=True) - UNIT
    normal = (size + (((BIAS - 127) << 23) + (1 << (DROP - 1)) - 1) + (size >> DROP & 1)) >> DROP
    byte = tl.where(size < ((128 - BIAS) << 23), small, normal)
    return byte | (bits >> 24 & 0x80), scale
