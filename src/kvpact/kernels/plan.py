"""Which implementation of an operation runs, and why."""

from __future__ import annotations

from collections import Counter
from typing import Any, NamedTuple

from kvpact.errors import BackendUnavailable
from kvpact.kernels.cpu import NativeLibrary, library

OPERATIONS = ("hadamard", "encode", "decode", "attend")
BACKENDS = ("torch", "cpu", "triton")
KERNELS = ("auto", "exact", "fast", "torch")

_NATIVE = ("encode", "decode", "attend")
"""Operations that the native library has."""


class Availability(NamedTuple):
    """One line of `report`."""

    operation: str
    backend: str
    available: bool
    reason: str


def native() -> tuple[NativeLibrary | None, str]:
    """Return the native library, or None, and the reason."""
    try:
        found = library()
    except BackendUnavailable as error:
        return None, str(error)
    return found, f"native, {found.level if found.level != 'none' else 'base instructions'}"


def report() -> list[Availability]:
    """Return every operation and backend, whether it can run, and why (not)."""
    lines = []
    found, why = native()
    for operation in OPERATIONS:
        torch_line = "plain torch, on every device; defines the result"
        lines.append(Availability(operation, "torch", True, torch_line))
        if operation in _NATIVE:
            lost = "" if found else "; attention over packed slots is many times slower in torch"
            lines.append(Availability(operation, "cpu", found is not None, why + lost))
        else:
            lines.append(Availability(operation, "cpu", False, "not part of this version"))
        gpu = "GPU kernels are not part of this version"
        lines.append(Availability(operation, "triton", False, gpu))
    return lines


class Kernel:
    """What computes for one cache; chosen when the cache is made.

    Parameters
    ----------
    requested : str
        What was asked for, one of `KERNELS`.
    library : NativeLibrary or None
        The native kernels; None for torch.
    reason : str
        Why that was chosen.
    """

    def __init__(self, requested: str, library: NativeLibrary | None, reason: str) -> None:
        self.requested, self.library, self.reason = requested, library, reason
        self.fast = requested == "fast"
        self.calls: Counter[str] = Counter()
        self.encodes: Counter[str] = Counter()
        self.decodes: Counter[str] = Counter()

    @property
    def name(self) -> str:
        """``torch``, or ``cpu`` with its arithmetic and instruction set."""
        if self.library is None:
            return "torch"
        return f"cpu {'fast' if self.fast else 'exact'} {self.library.level}"

    def __deepcopy__(self, memo: dict[int, Any]) -> Kernel:
        """Copies of a cache compute with the same kernel, and are counted together."""
        return self

    def stats(self) -> dict[str, Any]:
        """Return what ran and why.

        Returns
        -------
        dict
            ``name``, ``requested``, ``reason``; ``calls``: how many calls of attention took which
            way, those that the native kernel does not cover with the reason (``torch: …``);
            ``encodes`` and ``decodes``: the same of encoding and of decompression.
        """
        return {
            "name": self.name,
            "requested": self.requested,
            "reason": self.reason,
            "calls": dict(self.calls),
            "encodes": dict(self.encodes),
            "decodes": dict(self.decodes),
        }


def choose(kernel: str = "auto") -> Kernel:
    """Return what computes for a cache.

    Parameters
    ----------
    kernel : {"auto", "exact", "fast", "torch"}
        ``exact``: native kernels that agree with the torch bodies to rounding; ``fast``: native
        ones in 8-bit integers where there are such; ``auto``: ``exact`` if it can run, else
        ``torch``.

    Raises
    ------
    BackendUnavailable
        A kernel asked for by name can't run here.
    """
    if kernel not in KERNELS:
        known = ", ".join(KERNELS)
        raise BackendUnavailable(f"kernel {kernel!r} is not known; there are {known}")
    if kernel == "torch":
        return Kernel(kernel, None, "asked for")
    found, why = native()
    if found is None and kernel != "auto":
        raise BackendUnavailable(f"kernel {kernel!r}: {why}; use 'auto' or 'torch'")
    return Kernel(kernel, found, why)
