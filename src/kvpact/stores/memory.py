"""`MemoryStore`: entries in this process, gone with it."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Iterator

from kvpact.stores.base import Clock, GCReport
from kvpact.stores.record_store import RecordStore


class MemoryStore(RecordStore):
    """Entries in memory, checksums included.

    Parameters
    ----------
    max_bytes : int, optional
        Bytes of all entries, headers included; the least recently used ones make room.
    ttl : float, optional
        Seconds after which an entry is gone.
    clock : callable
        Gives seconds.
    """

    def __init__(
        self, *, max_bytes: int | None = None, ttl: float | None = None, clock: Clock = time.time
    ) -> None:
        super().__init__(ttl=ttl, max_bytes=max_bytes, clock=clock)
        self._records: OrderedDict[str, tuple[bytes, float]] = OrderedDict()
        self._bytes = 0
        self._lock = threading.RLock()

    def __repr__(self) -> str:
        return "MemoryStore()"

    def _read(self, name: str, *, use: bool = True) -> tuple[bytes, bytes] | None:
        with self._lock:
            if name not in self._records:
                return None
            if use:
                self._records.move_to_end(name)
            record = self._records[name][0]
            return record, record

    def _write(self, name: str, head: bytes, blob: memoryview, created: float) -> None:
        record = b"".join((head, blob))
        with self._lock:
            self._drop(name)
            self._make_room(len(record))
            self._records[name] = (record, created)
            self._bytes += len(record)

    def _make_room(self, size: int) -> None:
        while self._max_bytes is not None and self._bytes + size > self._max_bytes:
            self._drop(next(iter(self._records)))
            self._count("evictions")

    def _drop(self, name: str) -> None:
        record, _ = self._records.pop(name, (b"", 0.0))
        self._bytes -= len(record)

    def _discard(self, name: str, token: bytes) -> None:
        with self._lock:
            if name in self._records and self._records[name][0] is token:
                self._drop(name)

    def _contains(self, name: str) -> bool:
        with self._lock:
            return name in self._records and not self._expired(self._records[name][1])

    def _delete(self, name: str) -> bool:
        with self._lock:
            held = self._contains(name)
            self._drop(name)
            return held

    def _names(self) -> Iterator[str]:
        with self._lock:
            return iter([n for n, (_, made) in self._records.items() if not self._expired(made)])

    def _held(self) -> tuple[int, int]:
        with self._lock:
            return len(self._records), self._bytes

    def _collect(self) -> GCReport:
        with self._lock:
            before = self._bytes
            old = [n for n, (_, made) in self._records.items() if self._expired(made)]
            for name in old:
                self._drop(name)
            self._count("evictions", len(old))
            return GCReport(expired=len(old), freed=before - self._bytes)

    def _close(self) -> None:
        with self._lock:
            self._records.clear()
            self._bytes = 0
