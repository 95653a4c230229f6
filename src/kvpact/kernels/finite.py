"""Finiteness and range checks of incoming tokens; native where available."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from kvpact.errors import NonFiniteError
from kvpact.kernels.base import DTYPES
from kvpact.kernels.cpu.backend import CPU
from kvpact.kernels.cpu.encode import magnitudes
from kvpact.kernels.cpu.library import library
from kvpact.kernels.plan import StreamPlan
from kvpact.quantizers.checks import checks_are_deferred, require
from kvpact.quantizers.numbers import HALF_MAX


def largest(*tensors: Tensor) -> list[float]:
    """Return the largest magnitude in each `[B, H, T, D]`; NaN or infinity where one number is.

    The host waits for the answer. torch's `aminmax` defines it; the native pass is faster.
    """
    x = tensors[0]
    if x.is_cpu and x.dtype in DTYPES and x.dim() == 4 and not CPU.runs_here(x.device):
        return magnitudes(library(), tensors)
    ends = [torch.aminmax(x) if x.numel() else (0.0, 0.0) for x in tensors]
    return [max(-float(low), float(high)) for low, high in ends]


def all_finite(x: Tensor) -> bool:
    """Return whether no number of `[B, H, T, D]`, on any device, is NaN or infinite."""
    return math.isfinite(largest(x)[0])


def surely_stored(plan: StreamPlan, dim: int) -> float:
    """Return the magnitude up to which neither `check_arrival` nor an encoder refuses tokens."""
    codec = plan.codec
    if codec.exact and codec.max_abs == math.inf:
        return math.inf
    most = min(codec.max_abs, codec.max_norm, HALF_MAX if plan.limit is None else math.inf)
    return min(most / math.sqrt(dim), math.inf if plan.limit is None else plan.limit)


def check_arrival(plan: StreamPlan, x: Tensor, start: int, size: float | None) -> None:
    """Refuse tokens that can't be encoded once they leave the window; from `start` on they wait."""
    codec, dim = plan.codec, x.shape[3]
    if x.is_meta or (codec.exact and codec.max_abs == math.inf):
        return
    known = size is not None or not checks_are_deferred()
    if size is None:
        size = largest(x)[0] if known else 0.0
    if not (known and size * math.sqrt(dim) <= min(codec.max_abs, codec.max_norm)):
        codec.check_range(x, size)
    if codec.group > 1 or start >= x.shape[2]:
        return
    limit = HALF_MAX / math.sqrt(dim) if plan.limit is None else plan.limit
    if known and size <= limit:
        return
    waiting = x[:, :, start:]
    if codec.ready and (known or plan.limit is None):
        codec.encode(waiting.to(torch.float32))  # it decides, and names what it can't hold
    else:
        message = f"a number is beyond the {limit:.6g} that this method can surely hold"
        require((waiting.abs() <= limit).all(), lambda: NonFiniteError(message))
