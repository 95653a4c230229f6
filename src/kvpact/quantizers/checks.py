"""Checks of numbers, at once or deferred.

A check reads a flag from the device, and on a GPU that makes the host wait for everything queued.
Where checks are deferred the flags stay on the device, to be read at a natural point later.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from kvpact.errors import NonFiniteError

_local = threading.local()


@contextmanager
def deferred() -> Iterator[list[Tensor]]:
    """Collect the flags of this thread's checks (0-d bool, True where good) instead of reading."""
    before = getattr(_local, "flags", None)
    flags: list[Tensor] = [] if before is None else before
    _local.flags = flags
    try:
        yield flags
    finally:
        _local.flags = before


def collected() -> Tensor | None:
    """Return a 0-d bool, whether all that this thread deferred is good; None where nothing is."""
    flags: list[Tensor] | None = getattr(_local, "flags", None)
    return torch.stack(flags).all() if flags else None


def checks_are_deferred() -> bool:
    """Whether this thread collects flags."""
    return getattr(_local, "flags", None) is not None


def require(good: Tensor, error: Callable[[], NonFiniteError]) -> None:
    """Raise `error()` unless a flag is True; or leave the flag to whoever collects.

    Parameters
    ----------
    good : Tensor
        0-d bool on any device.
    error : callable
        Makes the error; may read from the device.
    """
    if good.is_meta:
        return
    flags: list[Tensor] | None = getattr(_local, "flags", None)
    if flags is not None:
        flags.append(good)
    elif not bool(good):
        raise error()


def are_finite(x: Tensor) -> Tensor:
    """Return a 0-d bool: no NaN, no infinity; many times faster than `isfinite`."""
    low, high = torch.aminmax(x)  # both are NaN where one number is
    return torch.isfinite(low) & torch.isfinite(high)


def require_finite(x: Tensor, error: Callable[[], NonFiniteError]) -> None:
    """Raise `error()` where a number of `x` is NaN or infinity; see `require`."""
    if x.is_meta or not x.numel():
        return
    if checks_are_deferred():
        require(are_finite(x), error)
        return
    low, high = torch.aminmax(x)
    # Python's own test: on a CPU it costs a fraction of three more tensors.
    if not (math.isfinite(low.item()) and math.isfinite(high.item())):
        raise error()
