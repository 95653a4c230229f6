"""Counts of the operations that each backend carried out."""

from __future__ import annotations

import threading
from collections import Counter
from typing import get_args

from kvpact.kernels.base import Operation


class Counts:
    """Counts of the operations that each backend carried out; for many threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: dict[str, Counter[str]] = {name: Counter() for name in get_args(Operation)}

    def add(self, who: str, **operations: int) -> None:
        """Count what a backend did."""
        with self._lock:
            for operation, count in operations.items():
                self._counts[operation][who] += count

    def as_dict(self) -> dict[str, dict[str, int]]:
        """Return the counts by operation and backend."""
        with self._lock:
            return {name: dict(counter) for name, counter in self._counts.items()}
