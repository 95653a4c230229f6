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
    """Collect the flags of this thread's checks (bool, True where good) instead of reading them."""
    before = getattr(_local, "flags", None)
    flags: list[Tensor] = []
    _local.flags = flags
    try:
        yield flags
    finally:
        _local.flags = before


def collected() -> Tensor | None:
    """Return a 0-d bool, whether all that this thread deferred is good; None where nothing is."""
    flags: list[Tensor] | None = getattr(_local, "flags", None)
    return torch.cat([flag.reshape(-1) for flag in flags]).all() if flags else None


def by_row(flags: list[Tensor] | None, rows: int) -> list[Tensor] | list[None]:
    """Return whether all flags (`[rows]` or 0-d) of each row are good; None if none is deferred."""
    if not flags:
        return [None] * rows
    good = torch.stack([flag.expand(rows) for flag in flags]).all(0)
    return list(good.unbind())


def checks_are_deferred() -> bool:
    """Return whether this thread collects flags."""
    return getattr(_local, "flags", None) is not None


def require(good: Tensor, error: Callable[[], NonFiniteError]) -> None:
    """Raise `error()` unless a flag (deferred, `[B]` too) is True; or collect the flag."""
    if good.is_meta:
        return
    flags: list[Tensor] | None = getattr(_local, "flags", None)
    if flags is not None:
        flags.append(good)
    elif not bool(good):
        raise error()


def require_finite(x: Tensor, error: Callable[[], NonFiniteError], below: float = math.inf) -> None:
    """Raise `error()` for NaN or magnitudes of `below` or more; deferred, by row."""
    if x.is_meta or not x.numel():
        return
    if checks_are_deferred():
        others = tuple(range(1, x.dim()))
        require((x.amin(others) > -below) & (x.amax(others) < below), error)
        return
    low, high = torch.aminmax(x)
    # Python's own comparison: on a CPU it costs a fraction of three more tensors.
    if not (-below < low.item() and high.item() < below):
        raise error()
