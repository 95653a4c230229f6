"""What `pca` learns: means, weights, principal components; and from what, where more is known."""

from __future__ import annotations

import torch
from torch import Tensor

from kvpact.errors import GeometryError, NonFiniteError
from kvpact.quantizers.numbers import cast, half

SMALL = 0.45
"""A token is of the second kind if its value's norm is less than so much of the median."""
LEAST_WEIGHT = 0.05
_RIDGE = 0.01
_LEAST_DEVIATION = 1e-5  # of the largest one


def principal_components(
    x: Tensor, small: Tensor | None = None, weight: Tensor | None = None
) -> dict[str, Tensor]:
    """Return means, weights, components and deviations of tokens.

    `x`: `[N, C]` finite, all heads of each token. `small`: `[N]` bool: tokens with a mean of their
    own, which is the others' where there is one such token at most. `weight`: `[C]` positive; 1 if
    omitted. Returns ``mean`` `[2, C]` fp32, ``weight`` `[C]` fp16, ``basis`` `[C, C]` fp16, a
    component a column, ``deviation`` `[C]` fp32, descending. Raises `NonFiniteError`.
    """
    width = x.shape[1]
    ones = x.new_ones(width, dtype=torch.float32)
    w = half(ones if weight is None else weight.float().to(x.device), "weight of a channel")
    tokens, wide = x.double(), w.double()
    first = second = tokens.mean(0)
    if small is not None and int(small.sum()) > 1 and not bool(small.all()):
        first, second = tokens[~small].mean(0), tokens[small].mean(0)
    means = cast(torch.stack([first, second]), torch.float32, "mean of tokens")
    first, second = ((tokens - mean) * wide for mean in means.double())
    nearer = second.square().sum(1, keepdim=True) < first.square().sum(1, keepdim=True)
    z = torch.where(nearer, second, first)
    # LAPACK may not converge where numbers are near the ends of their range.
    size = z.abs().amax().clamp(min=torch.finfo(torch.float32).tiny)
    z = z / size
    covariance = z.mT @ z / len(z)
    covariance += torch.diag_embed(_RIDGE * covariance.diagonal())
    variance, basis = torch.linalg.eigh(covariance)
    deviation = variance.flip(0).clamp(min=0).sqrt()
    largest = deviation[0]
    if not largest > 0:
        deviation, size = torch.ones_like(deviation), torch.ones_like(size)
    deviation = deviation.clamp(min=float(largest) * _LEAST_DEVIATION) * size
    deviation = deviation.clamp(min=torch.finfo(torch.float32).tiny)
    return {
        "mean": means,
        "weight": w,
        "basis": basis.flip(1).to(torch.float16).contiguous(),
        "deviation": cast(deviation, torch.float32, "deviation of a component"),
    }


def small_values(v: Tensor) -> Tensor:
    """Return which of `[N, C]` values are small: attention sinks inside the text."""
    norm = v.double().square().sum(1).sqrt()
    small: Tensor = norm < SMALL * norm.median()
    return small


def key_weights(energy: Tensor, channels: Tensor) -> Tensor:
    """Return the weights of keys, `[H_kv D]` fp32.

    `energy`: `[H_kv, D]`: mean square of the queries of each KV head. `channels`: `[P, 2]`: pairs
    of channels that RoPE turns together, which have one weight; others have their own.
    """
    paired = energy.double().clone()
    if len(channels):
        first, second = channels.long().unbind(1)
        both = (paired[:, first] + paired[:, second]) / 2
        paired[:, first], paired[:, second] = both, both
    return _relative(paired.sqrt())


def value_weights(energy: Tensor) -> Tensor:
    """Return the weights of values, `[H_kv D_v]` fp32.

    `energy`: `[H_kv, D_v]`: squares of what the output projection makes of each channel.
    """
    return _relative(energy.double().sqrt())


def _relative(weight: Tensor) -> Tensor:
    if weight.dim() != 2 or not weight.numel():
        raise GeometryError(f"energies are [H_kv, D], not {list(weight.shape)}")
    if not bool(weight.isfinite().all()):
        raise NonFiniteError("energies hold NaN, infinity or negative numbers")
    size = weight.square().mean().sqrt()
    relative = weight / size if size > 0 else torch.ones_like(weight)
    return relative.clamp(min=LEAST_WEIGHT).flatten().float()
