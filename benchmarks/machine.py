"""What a benchmark ran on."""

import os
import platform
from pathlib import Path

import torch


def processor() -> str:
    """Return the processor's architecture and name, as far as they are known."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text("utf-8").splitlines() if info.is_file() else []
    names = [line.partition(":")[2] for line in lines if line.startswith("model name")]
    return f"{platform.machine()} {names[0].strip() if names else ''}".strip()


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
