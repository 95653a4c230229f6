"""What a benchmark ran on."""

from __future__ import annotations

import os
import platform
from pathlib import Path

import torch


def processor() -> str:
    """Return the processor's architecture and name, as far as they are known."""
    names = [value for key, value in _cpuinfo() if key == "model name"]
    return f"{platform.machine()} {names[0] if names else ''}".strip()


def flags() -> set[str]:
    """Return the processor's features by Linux' names, none where they are not known."""
    return next((set(value.split()) for key, value in _cpuinfo() if key == "flags"), set())


def about(**more: object) -> dict[str, object]:
    """Return what stands at the head of a report.

    The load average is of the minute before: what else ran has made figures larger.
    """
    load = f"{os.getloadavg()[0]:.1f}" if hasattr(os, "getloadavg") else "unknown"
    found = {"processor": processor(), "cores": os.cpu_count(), "load before": load}
    return found | {"torch": torch.__version__} | more


def head(found: dict[str, object]) -> str:
    """Return `about` in one line."""
    return ", ".join(f"{key}: {value}" for key, value in found.items())


def _cpuinfo() -> list[tuple[str, str]]:
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8").splitlines()
    except OSError:
        return []
    parts = (line.partition(":") for line in lines)
    return [(key.strip(), value.strip()) for key, _, value in parts]
