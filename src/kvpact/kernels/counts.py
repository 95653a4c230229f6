"""How often each backend carried out each operation."""

from __future__ import annotations

import threading
from collections import Counter
from typing import get_args

from kvpact.kernels.base import Operation


class Counts:
    """How many operations each backend carried out; for many threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: dict[Operation, Counter[str]] = {
            name: Counter() for name in get_args(Operation)
        }

    def add(self, operation: Operation, who: str, count: int = 1) -> None:
        """Count operations."""
        with self._lock:
            self._counts[operation][who] += count

    def add_step(self, who: str, attends: int, encodes: int) -> None:
        """Count what steps did that were carried out at once."""
        with self._lock:
            self._counts["attend"][who] += attends
            self._counts["encode"][who] += encodes

    def as_dict(self) -> dict[str, dict[str, int]]:
        """Return the counts by operation and backend."""
        with self._lock:
            return {name: dict(counter) for name, counter in self._counts.items()}
