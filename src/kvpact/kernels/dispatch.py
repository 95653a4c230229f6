"""Which implementation of an operation runs, and why."""

from __future__ import annotations

from typing import NamedTuple

from kvpact.errors import BackendUnavailable

OPERATIONS = ("hadamard", "encode", "decode", "attend")
BACKENDS = ("torch", "cpu", "triton")


class Availability(NamedTuple):
    """One line of `report`."""

    operation: str
    backend: str
    available: bool
    reason: str


_REASONS = {
    "torch": "plain torch, on every device; defines the result",
    "cpu": "native CPU kernels are not part of this version",
    "triton": "GPU kernels are not part of this version",
}


def report() -> list[Availability]:
    """Return every operation and backend, whether it can run, and why (not)."""
    return [
        Availability(operation, backend, backend == "torch", _REASONS[backend])
        for operation in OPERATIONS
        for backend in BACKENDS
    ]


def choose(kernel: str = "auto") -> str:
    """Return the backend that `kernel` stands for.

    Parameters
    ----------
    kernel : str
        ``auto``, or a backend's name.

    Raises
    ------
    BackendUnavailable
        A backend asked for by name can't run here.
    """
    if kernel in ("auto", "torch"):
        return "torch"
    reason = _REASONS.get(kernel, f"no such backend; there are {', '.join(BACKENDS)}")
    raise BackendUnavailable(f"kernel {kernel!r}: {reason}; use 'auto' or 'torch'")
