"""What runs on this machine, and what carries out what for two codecs."""

from __future__ import annotations

import torch

from kvpact.kernels import plan
from kvpact.kernels.base import OPERATIONS
from kvpact.kernels.plan import Line
from kvpact.methods import Codec

_CPU = torch.device("cpu")


def devices() -> list[torch.device]:
    """Return the devices that are here, the CPU first."""
    return [_CPU, *(torch.device("cuda", i) for i in range(torch.cuda.device_count()))]


def report(device: torch.device = _CPU) -> list[Line]:
    """Return every operation and backend, whether it runs on a device, and why (not)."""
    lines = []
    for operation in OPERATIONS:
        for backend in plan.BACKENDS:
            reason = backend.runs_here(device)
            lines.append(Line(operation, backend.name, not reason, reason or backend.describe()))
    return lines


def coverage(k: Codec, v: Codec, device: torch.device, dtype: torch.dtype) -> list[Line]:
    """Return which backend of a device carries out what for two codecs, and why no better one.

    Where a backend attends with a slower kernel than it has for others, that has a reason, too.
    """
    lines = []
    for operation in OPERATIONS:
        reasons: list[str] = []
        for backend in plan.BACKENDS:
            if backend.runs_here(device):
                continue
            reason = next(filter(None, (backend.covers(operation, c, dtype) for c in (k, v))), "")
            if not reason:
                if operation == "attend" and (remark := backend.remark(k, v)):
                    reasons.append(f"{backend.name}: {remark}")
                lines.append(Line(operation, backend.name, True, "; ".join(reasons)))
                break
            reasons.append(f"{backend.name}: {reason}")
    return lines
