"""What the connector counts, and what it says once."""

from __future__ import annotations

import logging
import threading

# vLLM configures loggers below "vllm" alone.
logger = logging.getLogger(f"vllm.{__name__}")

COUNTED = {
    "loaded_tokens": "Tokens that were loaded from the store instead of being computed.",
    "loaded_chunks": "Chunks that were read from the store and used.",
    "loaded_bytes": "Bytes of these.",
    "saved_chunks": "Chunks that were written to the store.",
    "saved_bytes": "Bytes of these.",
    "misses": "Chunks of prompts that the store was asked for and does not hold.",
    "gone": "Chunks that the store holds and did not give: evicted meanwhile, damaged, or away.",
    "damaged": "Chunks that failed a checksum, or are not what their key says.",
    "timeouts": "Lookups and loads that took longer than the timeout.",
    "dropped": "Chunks that were not saved: the queue or the store was full.",
    "failures": "Operations of the store that raised an error.",
    "recomputed_tokens": "Tokens whose load failed; vLLM computes them.",
}
"""Names of the counters, and what they count."""


class ConnectorCounts:
    """Counters; may be used from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._total = dict.fromkeys(COUNTED, 0)
        self._taken = dict(self._total)
        self._said: set[str] = set()

    def add(self, name: str, by: int = 1) -> None:
        """Count."""
        with self._lock:
            self._total[name] += by

    def total(self) -> dict[str, int]:
        """Return all counters since the start."""
        with self._lock:
            return dict(self._total)

    def take(self) -> dict[str, int]:
        """Return what was counted since the last call, without zeros."""
        with self._lock:
            new = {name: n - self._taken[name] for name, n in self._total.items()}
            self._taken = dict(self._total)
        return {name: n for name, n in new.items() if n}

    def say(self, name: str, message: str, by: int = 1) -> None:
        """Count a failure, and log it if it is the first of its name."""
        self.add(name, by)
        with self._lock:
            first = name not in self._said
            self._said.add(name)
        if first:
            logger.warning("kvpact's connector: %s. Later ones are counted (%s).", message, name)
