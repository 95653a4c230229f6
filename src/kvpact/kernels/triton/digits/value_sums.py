"""Sums of a block's values: products of V's levels and digits of weights."""

import triton
import triton.language as tl

from kvpact.kernels.triton.digits.key_scores import scales, zeros_of
from kvpact.kernels.triton.digits.levels import MOST, split_digits, whole
from kvpact.kernels.triton.digits.operands import (
    value_operand,
    value_width,
    weight_operand,
)
from kvpact.kernels.triton.digits.tiles import load_per_token
from kvpact.kernels.triton.forms import SlotForm
from kvpact.kernels.triton.trellis.numbers import e5m3
from kvpact.kernels.triton.trellis.values import (
    channels_of_values,
    token_order,
    trellis_weights,
    value_levels,
)


@triton.constexpr_function
def order_of(form: SlotForm) -> int:
    """Return the order of tokens that scores have, as of `token_places`."""
    return token_order(form) if form.kind == "trellis" else form.bits


@triton.jit
def channels_of(FORM: tl.constexpr):
    """Return the channel of each row of a group's sums, counted from the group's first."""
    if FORM.kind == "trellis":
        return channels_of_values(FORM)
    else:
        d = tl.arange(0, value_width(FORM))
        return (d // 32) * 32 + (d % 8) * 4 + (d // 8) % 4


@triton.jit
def _step(top):
    """Return what digits are worth of a block's largest weights: small ones keep their digits."""
    return tl.maximum(tl.max(top, 0), 1e-30) * (1.0 / MOST)


@triton.jit
def _digits(weights, step):
    """Return the digits of weights `[N, G]`: int8 `[N, 2 G]`."""
    pair = split_digits(weights * (1.0 / step)[None, :])
    return pair.reshape(weights.shape[0], weights.shape[1] * 2)


@triton.jit
def value_sums(
    acc, decay, p, fields, live, TABLE, worth, V: tl.constexpr, KW: tl.constexpr, ASM: tl.constexpr
):
    """Return sums in levels, fp32 `[value_width, G]` of each group of channels.

    `acc`, `decay`: those of the blocks before, and what they are worth; `p`: weights `[N, G]`;
    `fields`: of `tiles.fields_of`; `TABLE`, `live`, `worth`: V's levels, which tiles are there, and
    what a level is worth.
    """
    codes, scale, zero = fields
    ORDER: tl.constexpr = V.bits
    VG: tl.constexpr = V.groups
    weights = p * scales(scale, live, 0, ORDER)[:, None]
    top = tl.abs(weights)
    for group in tl.static_range(1, VG):
        top = tl.maximum(top, tl.abs(p * scales(scale, live, group, ORDER)[:, None]))
    step = _step(top)
    sums = ()
    for group in tl.static_range(VG):
        if group > 0:
            weights = p * scales(scale, live, group, ORDER)[:, None]
        v = value_operand(codes, live, TABLE, group, V, KW, ASM)
        pair = weight_operand(_digits(weights, step), V, KW)
        o = whole(tl.dot(v, pair, out_dtype=tl.int32), 256) * step[None, :]
        if V.has("zero"):
            zeros = p * zeros_of(zero, scale, live, group, V, ORDER)[:, None]
            o += (tl.sum(zeros, 0) * (1.0 / worth))[None, :]
        sums += (acc[group] * decay[None, :] + o,)
    return sums


@triton.jit
def trellis_sums(
    acc, decay, p, fields, live, TABLE, V: tl.constexpr, KW: tl.constexpr, ASM: tl.constexpr
):
    """Return the sums of a trellis, of one group of channels; parameters as of `value_sums`."""
    codes, scale, _ = fields
    weights = p * e5m3(load_per_token(scale, live, 0, order_of(V)))[:, None]
    step = _step(weights)
    pair = trellis_weights(_digits(weights, step), V, KW)
    v = value_levels(codes, live, TABLE, V, KW, ASM)
    o = whole(tl.dot(v, pair, out_dtype=tl.int32), 256)
    return (acc[0] * decay[None, :] + o * step[None, :],)
