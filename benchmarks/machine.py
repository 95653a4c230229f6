"""What a benchmark ran on."""

import os

import torch

from kvpact.evaluate.files import processor


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
