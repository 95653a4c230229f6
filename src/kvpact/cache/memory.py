"""Memory: reserved as addresses and claimed page by page; and a name for its lack."""

from __future__ import annotations

import mmap
import platform
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from math import prod

import torch
from torch import Tensor

from kvpact.errors import CacheFull, KVPactError

_NORESERVE_ON = {("Linux", "x86_64"), ("Linux", "aarch64")}

# Without it Linux refuses more than there is memory. Python's name for it is younger than 3.11.
_NORESERVE = 0x4000 if (platform.system(), platform.machine()) in _NORESERVE_ON else 0


def reserve(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return zeros on the CPU whose memory is claimed when written to, unlike `torch.empty`'s."""
    count = prod(shape)
    try:
        region = _map(count * dtype.itemsize)
    except (OSError, OverflowError, ValueError) as error:
        raise CacheFull(
            f"the system can't reserve {count * dtype.itemsize:,} bytes ({error}); "
            "take fewer tokens, or a 16-bit dtype"
        ) from error
    return torch.frombuffer(region, dtype=dtype, count=count).view(shape)


@contextmanager
def room_for(what: str, wanted: Mapping[torch.device, int] | None = None) -> Iterator[None]:
    """Raise `CacheFull` where there is no memory for `what`, or for the bytes wanted of devices."""
    try:
        # In one piece: many small ones would be taken until nothing is left for other programs.
        for device, count in (wanted or {}).items():
            torch.empty(min(count, 1 << 62), dtype=torch.uint8, device=device)
        yield
    except KVPactError:
        raise
    except (MemoryError, RuntimeError) as error:  # torch has no class for it on the CPU
        raise CacheFull(f"there is no memory for {what}; take fewer") from error


def _map(size: int) -> mmap.mmap:
    private = getattr(mmap, "MAP_PRIVATE", None)
    if private is None:  # Windows: backed by the page file, and resident when touched
        return mmap.mmap(-1, size)
    flags = private | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", _NORESERVE)
    region = mmap.mmap(-1, size, flags=flags)
    # A huge page would claim 2 MB per layer for the first token.
    advice = getattr(mmap, "MADV_NOHUGEPAGE", None)
    if advice is not None:
        with suppress(OSError):  # the kernel was built without huge pages
            region.madvise(advice)
    return region
