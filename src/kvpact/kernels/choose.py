"""The `Compute` that a user asks for; what runs on this machine, and for which codecs."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kvpact.errors import BackendUnavailable
from kvpact.geometry import CacheGeometry
from kvpact.kernels import plan
from kvpact.kernels.base import OPERATIONS
from kvpact.kernels.cpu.library import cap
from kvpact.kernels.plan import BACKENDS, Compute, Line
from kvpact.methods import Codec, make_codec
from kvpact.spec import Spec

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
    """Return which backend of a device carries out what for two codecs, and why no better one."""
    compute, lines = Compute(), []
    for operation in OPERATIONS:
        backend, why = compute.backend(operation, (k, v), device, dtype)
        remark = backend.remark(k, v) if operation == "attend" else ""
        reasons = (why, remark and f"{backend.name}: {remark}")
        lines.append(Line(operation, backend.name, True, "; ".join(filter(None, reasons))))
    return lines


NAMES = ("auto", *(backend.name for backend in BACKENDS))
CHECKS = ("now", "deferred")


def choose(backend: str = "auto", check: str = "now") -> Compute:
    """Return the `Compute` of a cache (see `create_cache`). Raises `BackendUnavailable`."""
    if backend not in NAMES:
        raise BackendUnavailable(
            f"backend {backend!r} is not known; a backend chooses kernels ({', '.join(NAMES)}). To "
            "quantize as quanto or HQQ do, write: CompressedCache(model, 'int:bits=4,group=64')"
        )
    if check not in CHECKS:
        raise BackendUnavailable(f"check {check!r} is not known; there are {', '.join(CHECKS)}")
    cap()  # a misspelt KVPACT_SIMD is an error, not a reason to be slow
    found = [one for one in BACKENDS if backend in ("auto", one.name)]
    reasons = [one.runs_here(device) for one in found for device in devices()]
    if all(reasons):
        raise BackendUnavailable(f"backend {backend!r}: {reasons[0]}; use 'auto' or 'torch'")
    return Compute(backend, check == "deferred")


def check_covered(
    compute: Compute, specs: Sequence[Spec], geometry: CacheGeometry, offset: bool = False
) -> None:
    """Raise `BackendUnavailable` if the backend asked for by name does not cover every spec."""
    if not compute.named:
        return
    dtype = geometry.dtype or torch.float32
    named = next(one for one in BACKENDS if one.name == compute.requested)
    device = next((one for one in devices() if not named.runs_here(one)), _CPU)
    for spec in set(specs):
        codecs = (
            make_codec(spec.key, True, geometry.head_dim, dtype),
            make_codec(spec.value, False, geometry.value_dim, dtype),
        )
        for operation in OPERATIONS:
            # What is kept exactly has no offset.
            known = offset and operation == "attend" and not codecs[0].exact
            latent = geometry.latent and operation == "attend"
            compute.backend(operation, codecs, device, dtype, known, latent)
