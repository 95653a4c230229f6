"""Bases of keys (see `methods.bases`), tile by tile: which they are, what they add to logits."""

import triton
import triton.language as tl

from kvpact.kernels.triton.transforms import tree_sum
from kvpact.methods import bases

MEAN, FIRST, NOTHING = (tl.constexpr(x) for x in (bases.MEAN, bases.FIRST, bases.NOTHING))


@triton.jit
def base_flags(flags, tile):
    """Return which base each of the 32 tokens of a tile of a segment and head has, int32."""
    token = tl.arange(0, 32)
    return tl.load(flags + tile * 2 + token // 16) >> (token % 16 * 2) & 3


@triton.jit
def base_logits(flags, mean, step, query, first, tile, channel, FORM: tl.constexpr):
    """Return the products of queries and the bases of 32 tokens, fp32 `[rows, 32]`.

    Over some channels: those of several calls have to be added, one of which has `first`.

    `flags`, `mean`, `step`: units of the fields of a segment and head, int32, int8 and fp16; of no
    account where `FORM` has no mean. `query`: fp32 `[rows, channels]`, scaled, not transformed; 0
    behind the last channel. `first`: fp32 `[rows]`, their products with the first key; 0 where it
    is no base. `channel`: int32 `[channels]`, which they are. `tile`: of 32 tokens inside the
    segment. `FORM`: the `SlotForm`, which has bases.
    """
    flag = base_flags(flags, tile)
    logits = tl.where((flag == FIRST)[None, :], first[:, None], 0.0)
    if FORM.has("mean"):
        group = tile * 32 // FORM.trellis.center
        numbers = tl.load(mean + group * FORM.dim + channel, mask=channel < FORM.dim, other=0)
        product = tl.sum(query * numbers.to(tl.float32)[None, :], 1)
        at_mean = product * tl.load(step + group).to(tl.float32)
        logits = tl.where((flag == MEAN)[None, :], at_mean[:, None], logits)
    return logits


@triton.jit
def distance(rest, weight, FORM: tl.constexpr):
    """Return the square lengths of what bases leave of tokens, fp32 `[32, padded]`, weighted."""
    rest = rest * weight[None, :]
    return tree_sum(rest * rest, 32, FORM.padded, FORM.dim)


@triton.jit
def chosen_bases(far, to_first, to_mean):
    """Return the nearest bases of tokens, by their distances to nothing and to bases."""
    flag = tl.where(to_first < to_mean, FIRST, MEAN)
    return tl.where(far <= tl.minimum(to_mean, to_first), NOTHING, flag)
