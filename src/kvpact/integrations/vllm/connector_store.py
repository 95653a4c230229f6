"""The store of both sides of the connector: options, threads, counters.

Nobody who serves tokens ever waits for a store: threads talk to it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, fields
from typing import Any

from kvpact.errors import FormatError, StoreError
from kvpact.files import read_regular
from kvpact.stores import Store, open_store


@dataclass(frozen=True, kw_only=True)
class ConnectorOptions:
    """The connector's options, ``kv_connector_extra_config``; docs/vllm.md describes them."""

    store: str
    timeout: float = 5.0
    chunk: int | None = None
    tenant: str = ""
    model: str | None = None
    storage: str | None = None
    secret_file: str | None = None
    queue_bytes: int = 256 << 20

    def __post_init__(self) -> None:
        for name, kinds, good in (
            ("store", str, bool(self.store)),
            ("timeout", int | float, _above_zero(self.timeout)),
            ("chunk", int | None, self.chunk is None or _above_zero(self.chunk)),
            ("tenant", str, True),
            ("model", str | None, self.model != ""),
            ("storage", str | None, self.storage != ""),
            ("secret_file", str | None, self.secret_file != ""),
            ("queue_bytes", int, _above_zero(self.queue_bytes)),
        ):
            value = getattr(self, name)
            if not good or not isinstance(value, kinds) or isinstance(value, bool):
                raise StoreError(f"kv_connector_extra_config: {name} can't be {value!r}")


def options_of(extra: Mapping[str, Any]) -> ConnectorOptions:
    """Read ``kv_connector_extra_config``; raises as `ConnectorOptions`."""
    known = [field.name for field in fields(ConnectorOptions)]
    unknown = [name for name in extra if name not in known]
    if unknown or "store" not in extra:
        what = f"there is no {unknown[0]!r}" if unknown else "it needs a store"
        raise StoreError(f"kv_connector_extra_config: {what}; the options are {', '.join(known)}")
    return ConnectorOptions(**extra)


def _above_zero(value: Any) -> bool:
    return isinstance(value, int | float) and value > 0


_shared: dict[tuple[str, str | None], tuple[Store, int]] = {}
_lock = threading.Lock()


def share_store(options: ConnectorOptions) -> Store:
    """Open the store, or return the one that this process (scheduler, worker) has open."""
    which = options.store, options.secret_file
    with _lock:
        if which in _shared:
            store, users = _shared[which]
        else:
            path, secret = options.secret_file, None
            try:
                secret = None if path is None else read_regular(path)
            except (OSError, FormatError) as error:
                raise StoreError(
                    f"kv_connector_extra_config: no secret_file {path!r} ({error})"
                ) from error
            store, users = open_store(options.store, secret=secret), 0
        _shared[which] = store, users + 1
        return store


def release_store(options: ConnectorOptions) -> None:
    """Close a store after its last user."""
    which = options.store, options.secret_file
    with _lock:
        store, users = _shared.pop(which)
        if users > 1:
            _shared[which] = store, users - 1
            return
    store.close()


# vLLM configures loggers below "vllm" alone.
logger = logging.getLogger(f"vllm.{__name__}")

COUNTED = {
    "loaded_tokens": "Tokens that were loaded from the store instead of being computed.",
    "loaded_chunks": "Chunks that were read from the store and used.",
    "loaded_bytes": "Bytes of these.",
    "saved_chunks": "Chunks that were written to the store.",
    "saved_bytes": "Bytes of these.",
    "misses": "Chunks of prompts that the store was asked for and does not hold.",
    "gone": "Chunks that the store held when it was asked and did not give: evicted meanwhile.",
    "damaged": "Chunks that failed a checksum, or are not what their key says.",
    "timeouts": "Lookups and loads that took longer than the timeout.",
    "dropped": "Chunks that were not saved: the queue or the store was full.",
    "failures": "Operations of the store that raised an error.",
    "recomputed_tokens": "Tokens whose load failed; vLLM computes them.",
}
"""Names of the counters, and what they count."""
_SECONDS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0)
NOTED: dict[str, tuple[str, Sequence[float]]] = {
    "load_time_seconds": ("Seconds from the plan of a load to its tokens in pages.", _SECONDS),
    "save_time_seconds": ("Seconds to pack a chunk and to write it to the store.", _SECONDS),
    "waiting_chunks": ("Chunks that wait to be saved, when some join them.", (1, 4, 16, 64, 256)),
}
"""Names of the histograms, what is noted for them, and the bounds of their buckets."""


class ConnectorCounts:
    """Counters; may be used from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._total = dict.fromkeys(COUNTED, 0)
        self._taken = dict(self._total)
        self._noted: dict[str, list[float]] = {}
        self._said: set[str] = set()

    def add(self, name: str, by: int = 1) -> None:
        """Count."""
        with self._lock:
            self._total[name] += by

    def note(self, name: str, value: float) -> None:
        """Note a value of a histogram."""
        with self._lock:
            self._noted.setdefault(name, []).append(value)

    def total(self) -> dict[str, int]:
        """Return all counters since the start."""
        with self._lock:
            return dict(self._total)

    def take(self) -> dict[str, int | list[float]]:
        """Return the counts and samples since the last call, without zeros."""
        with self._lock:
            new = {name: n - self._taken[name] for name, n in self._total.items()}
            self._taken = dict(self._total)
            noted, self._noted = self._noted, {}
        return {name: n for name, n in new.items() if n} | noted

    def say(self, name: str, message: str, by: int = 1) -> None:
        """Count a failure, and warn of it if it is the first of its name."""
        self.add(name, by)
        with self._lock:
            first = name not in self._said
            self._said.add(name)
        level = logging.WARNING if first else logging.DEBUG
        logger.log(level, "kvpact's connector: %s. Later ones are counted (%s).", message, name)


IDLE = 0.01  # seconds that an engine with nothing to compute waits for a job before it looks around


class Job(Future[Any]):
    """The future of a `Lane`'s `work`, which notes `progress`; `stopped`: no longer wanted."""

    def __init__(self, work: Callable[[Job], Any]) -> None:
        super().__init__()
        self.stopped, self.progress, self._work = False, 0, work

    def run(self) -> None:
        """Do the work; nothing is raised."""
        try:
            self.set_result(None if self.stopped else self._work(self))
        except BaseException as error:  # a third party's store may raise anything
            self.set_exception(error)


class Lane:
    """Does jobs in the order in which they come, in threads that end with the process."""

    def __init__(self, name: str, threads: int = 1) -> None:
        self._changed = threading.Condition()
        self._waiting: deque[Job] = deque()
        self._began: list[float | None] = [None] * threads
        self._closing = False
        for index in range(threads):
            threading.Thread(target=self._serve, args=(index,), name=name, daemon=True).start()

    def submit(self, work: Callable[[Job], Any]) -> Job:
        """Queue a job and return it."""
        job = Job(work)
        with self._changed:
            self._waiting.append(job)
            self._changed.notify_all()
        return job

    def stuck(self, seconds: float) -> bool:
        """Return whether all threads have been at one job for longer than this."""
        now = time.monotonic()
        with self._changed:
            return all(began is not None and now - began > seconds for began in self._began)

    def wait(self) -> None:
        """Wait until a job ends, for `IDLE` seconds at most."""
        with self._changed:
            self._changed.wait(IDLE)

    def close(self, seconds: float) -> bool:
        """Let the threads end when all is done; wait so long at most and return whether it is."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
            return self._changed.wait_for(
                lambda: not self._waiting and not any(x is not None for x in self._began), seconds
            )

    def _serve(self, index: int) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._closing)
                if not self._waiting:
                    return
                job = self._waiting.popleft()
                self._began[index] = time.monotonic()
            job.run()
            with self._changed:
                self._began[index] = None
                self._changed.notify_all()
