"""What a process holds in memory, by the kernel's own count (Linux)."""

from __future__ import annotations

import gc
from pathlib import Path

STATUS, CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def status(key: str) -> int:
    """Return a line of /proc/self/status in bytes."""
    for line in STATUS.read_text().splitlines():
        name, _, value = line.partition(":")
        if name == key:
            return int(value.split()[0]) * 1024
    raise KeyError(key)


def resident() -> int:
    """Return the bytes resident, free ones that no one gave back to the system among them."""
    gc.collect()
    return status("VmRSS")


def peak_start() -> int:
    """Set the peak back to what is resident now, and return that."""
    found = resident()
    CLEAR.write_text("5")  # resets VmHWM, see proc(5)
    return found


def peak_over(start: int) -> int:
    """Return how many bytes more than at the start were resident at any time since."""
    return status("VmHWM") - start
