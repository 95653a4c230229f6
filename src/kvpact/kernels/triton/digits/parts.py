"""What kernels do that attend over parts of packed tokens: blocks of a part, softmax, the end."""

import triton
import triton.language as tl


@triton.jit
def blocks_of(first, last, split, N: tl.constexpr):
    """Return the blocks of N tokens of a part: the first, and the one behind the last."""
    begin, end = first // N, tl.cdiv(last, N)
    share = tl.cdiv(end - begin, tl.num_programs(0))
    begin += split * share
    return begin, tl.minimum(begin + share, end)


@triton.jit
def capped(s, cap):
    """Return `cap * tanh(s / cap)` of logits of base 2; `cap` is the softcap times log2 e."""
    return cap - 2.0 * cap / (tl.exp2(s * (2.8853900817779268 / cap)) + 1.0)


@triton.jit
def hide(s, token, first, last, hidden, queries):
    """Hide tokens `[N]` from rows `[G]`: all outside of a range, and those up to `hidden + i`."""
    g = tl.arange(0, s.shape[1])
    shown = ((token >= first) & (token < last))[:, None]
    shown = shown & (token[:, None] > (hidden + g % queries)[None, :])
    return tl.where(shown, s, -float("inf"))


@triton.jit
def soften(s, peak, total):
    """Return weights of logits `[N, G]` of base 2, what sums so far are worth, peaks, totals."""
    new = tl.maximum(peak, tl.max(s, 0))
    safe = tl.where(new == -float("inf"), 0.0, new)
    decay = tl.exp2(peak - safe)
    p = tl.exp2(s - safe[None, :])
    return p, decay, new, total * decay + tl.sum(p, 0)


@triton.jit
def store_sums(PACKED, acc, total, worth, out, rows, channel, dim):
    """Store sums `[channels, G]` over totals, at rows `out` of PACKED."""
    norm = worth / tl.where(total == 0.0, 1.0, total)
    kept = (tl.arange(0, acc.shape[1]) < rows)[None, :] & (channel < dim)[:, None]
    tl.store(PACKED + out[None, :] * dim + channel[:, None], acc * norm[None, :], mask=kept)


@triton.jit
def store_lse(LSE, peak, total, out, rows):
    """Store the log-sum-exp of a part; -inf where no token was seen."""
    none = total == 0.0
    lse = tl.where(none, -float("inf"), peak + tl.log2(tl.where(none, 1.0, total)))
    tl.store(LSE + out, lse, mask=tl.arange(0, peak.shape[0]) < rows)
