"""Whether tokens are numbers, and can be stored; the native kernels look through them if there."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from kvpact.errors import NonFiniteError
from kvpact.kernels.cpu.backend import CPU
from kvpact.kernels.cpu.encode import magnitude
from kvpact.kernels.cpu.library import library
from kvpact.kernels.dense import DTYPES
from kvpact.methods import Codec
from kvpact.quantizers.checks import checks_are_deferred, require
from kvpact.quantizers.numbers import HALF_MAX


def largest(x: Tensor) -> float:
    """Return the largest magnitude in `[B, H, T, D]`; NaN or infinity where one number is.

    The host waits for the answer. torch's `aminmax` defines it; the native pass is faster.
    """
    if x.dtype in DTYPES and x.dim() == 4 and not CPU.runs_here(x.device):
        return magnitude(library(), x)
    low, high = torch.aminmax(x)
    return max(-float(low), float(high))


def all_finite(x: Tensor) -> bool:
    """Return whether no number of `[B, H, T, D]`, on any device, is NaN or infinite."""
    return math.isfinite(largest(x))


def check_arrival(codec: Codec, x: Tensor, start: int) -> None:
    """Refuse tokens `[B, H, T, D]` that can't be encoded when they leave the window.

    Those from `start` on are to wait; those before are encoded now, which refuses by itself.

    Raises
    ------
    NonFiniteError
        A token that the codec can't hold.
    """
    waiting = x[:, :, start:]
    if codec.exact or x.is_meta:
        return
    known = not checks_are_deferred()
    size = largest(x) if known else 0.0
    codec.check_range(x, size)
    form = codec.encoding() if codec.group == 1 else None
    limit = HALF_MAX / math.sqrt(x.shape[3]) if form is None else form.limit
    if codec.group > 1 or not waiting.shape[2] or (known and size <= limit):
        return
    if codec.ready and (known or form is None):
        codec.encode(waiting.to(torch.float32))  # it decides, and names what it can't hold
    else:
        message = f"a number is beyond the {limit:.6g} that this method can surely hold"
        require((waiting.abs() <= limit).all(), lambda: NonFiniteError(message))
