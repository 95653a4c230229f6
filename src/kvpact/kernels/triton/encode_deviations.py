"""Deviations of a tile's tokens and channels, for its balance (see `encode_balance`)."""

from __future__ import annotations

import triton
import triton.language as tl

from kvpact.kernels.triton.transforms import log2, tree_sum

NUMBERS = 4096
"""Numbers of a tile that a program has in its registers at a time."""
_AT_ONCE = tl.constexpr(NUMBERS)


@triton.jit
def divided(x, by):
    """Return `x / by`, correctly rounded, of shapes that can be broadcast to that of `x`."""
    return tl.div_rn(x, tl.broadcast_to(by, x.shape))


@triton.jit
def by_count(x, COUNT: tl.constexpr):
    """Return `x` over a number, correctly rounded."""
    return tl.div_rn(x, tl.full(x.shape, COUNT, tl.float32))


@triton.jit
def within(x, LEAST: tl.constexpr, MOST: tl.constexpr):
    """Return `x`, or the end that it is beyond."""
    return tl.minimum(tl.maximum(x, LEAST), MOST)


@triton.jit
def _balanced(x, by_token, by_channel, FORM: tl.constexpr):
    """Return `x / column / row`: columns are tokens (K) or channels (V)."""
    if FORM.order == "token":
        x = divided(divided(x, by_token), by_channel)
    else:
        x = divided(divided(x, by_channel), by_token)
    return x


@triton.jit
def _deviation(x, ROWS: tl.constexpr, WIDTH: tl.constexpr, COUNT: tl.constexpr):
    """Return the standard deviation of the first `COUNT` numbers of each row."""
    mean = by_count(tree_sum(x, ROWS, WIDTH, COUNT), COUNT)
    rest = x - mean[:, None]
    return tl.sqrt_rn(by_count(tree_sum(rest * rest, ROWS, WIDTH, COUNT), COUNT))


@triton.jit
def _some_tokens(X, first, ROWS: tl.constexpr, FORM: tl.constexpr):
    """Return numbers `[ROWS, padded]` of tokens from `first` on."""
    t, d = first + tl.arange(0, ROWS), tl.arange(0, FORM.padded)
    place = X + t[:, None] * FORM.dim + d[None, :]
    return tl.load(place, mask=(d < FORM.dim)[None, :], other=0.0)


@triton.jit
def balanced_tokens(X, BY_TOKEN, BY_CHANNEL, first, ROWS: tl.constexpr, FORM: tl.constexpr):
    """Return `_balanced` of tokens from `first` on, `[ROWS, padded]`."""
    d = tl.arange(0, FORM.padded)
    by_token = tl.load(BY_TOKEN + first + tl.arange(0, ROWS))[:, None]
    by_channel = tl.load(BY_CHANNEL + d, mask=d < FORM.dim, other=1.0)[None, :]
    return _balanced(_some_tokens(X, first, ROWS, FORM), by_token, by_channel, FORM)


@triton.jit
def balanced_channels(X, BY_TOKEN, BY_CHANNEL, first, ROWS: tl.constexpr, FORM: tl.constexpr):
    """Return `_balanced` of channels from `first` on, `[ROWS, group]`."""
    d, t = first + tl.arange(0, ROWS), tl.arange(0, FORM.group)
    place = X + t[None, :] * FORM.dim + d[:, None]
    x = tl.load(place, mask=(d < FORM.dim)[:, None], other=0.0)
    by_token = tl.load(BY_TOKEN + t)[None, :]
    by_channel = tl.load(BY_CHANNEL + d, mask=d < FORM.dim, other=1.0)[:, None]
    return _balanced(x, by_token, by_channel, FORM)


@triton.jit
def token_deviations(X, BY_TOKEN, BY_CHANNEL, OUT, ROWS: tl.constexpr, FORM: tl.constexpr):
    """Store the deviation of each token's balanced channels."""
    for first in range(0, FORM.group, ROWS):
        x = balanced_tokens(X, BY_TOKEN, BY_CHANNEL, first, ROWS, FORM)
        tl.store(OUT + first + tl.arange(0, ROWS), _deviation(x, ROWS, FORM.padded, FORM.dim))


@triton.jit
def channel_deviations(X, BY_TOKEN, BY_CHANNEL, OUT, ROWS: tl.constexpr, FORM: tl.constexpr):
    """Store the deviation of each channel's balanced tokens."""
    for first in range(0, FORM.dim, ROWS):
        x = balanced_channels(X, BY_TOKEN, BY_CHANNEL, first, ROWS, FORM)
        d = first + tl.arange(0, ROWS)
        tl.store(OUT + d, _deviation(x, ROWS, FORM.group, FORM.group), mask=d < FORM.dim)


@triton.jit
def _flat_sum(X, SIZE: tl.constexpr):
    """Return the tree sum of `SIZE` numbers that stand one behind the other; they are lost."""
    for level in range(log2(SIZE)):
        size = (SIZE + (1 << level) - 1) >> level
        half = size // 2
        for first in range(0, half, _AT_ONCE):
            i = first + tl.arange(0, _AT_ONCE)
            low = tl.load(X + i, mask=i < half, other=0.0)
            tl.store(X + i, low + tl.load(X + half + i, mask=i < half, other=0.0), mask=i < half)
        tl.debug_barrier()
        tl.store(X + half, tl.load(X + size - 1), mask=size % 2 == 1)
        tl.debug_barrier()
    return tl.load(X)


@triton.jit
def flat_mean(Y, X, less, SQUARED: tl.constexpr, ROWS: tl.constexpr, FORM: tl.constexpr):
    """Return the mean of a tile's numbers, or of their squares less a number, row by row."""
    d = tl.arange(0, FORM.padded)
    for first in range(0, FORM.group, ROWS):
        t = first + tl.arange(0, ROWS)
        y = _some_tokens(Y, first, ROWS, FORM)
        if SQUARED:
            y = (y - less) * (y - less)
        if FORM.order == "token":
            place = t[:, None] + d[None, :] * FORM.group
        else:
            place = t[:, None] * FORM.dim + d[None, :]
        tl.store(X + place, y, mask=(d < FORM.dim)[None, :])
    tl.debug_barrier()
    SIZE: tl.constexpr = FORM.dim * FORM.group
    return by_count(_flat_sum(X, SIZE), SIZE)


@triton.jit
def normalised(Y, X, whole, ROWS: tl.constexpr, FORM: tl.constexpr):
    """Store the tile over a number; return the largest magnitude before."""
    d = tl.arange(0, FORM.padded)
    most = tl.zeros((ROWS,), tl.float32)
    for first in range(0, FORM.group, ROWS):
        t = first + tl.arange(0, ROWS)
        y = _some_tokens(Y, first, ROWS, FORM)
        most = tl.maximum(most, tl.max(tl.abs(y), 1))
        place = X + t[:, None] * FORM.dim + d[None, :]
        tl.store(place, divided(y, whole), mask=(d < FORM.dim)[None, :])
    return tl.max(most, 0)
