"""Whether tokens are numbers, looked through by the native kernels where they are there."""

from __future__ import annotations

import math

from torch import Tensor

from kvpact.kernels.cpu.backend import CPU
from kvpact.kernels.cpu.encode import magnitude
from kvpact.kernels.cpu.library import library
from kvpact.kernels.dense import DTYPES
from kvpact.quantizers.checks import are_finite


def all_finite(x: Tensor) -> bool:
    """Return whether no number of `[B, H, T, D]`, on any device, is NaN or infinite.

    The host waits for the answer. torch's `are_finite` defines it; the native pass is faster.
    """
    if x.dtype not in DTYPES or CPU.runs_here(x.device):
        return bool(are_finite(x))
    return math.isfinite(magnitude(library(), x))
