"""`BackgroundStore`: puts that don't wait for the store they go to."""

from __future__ import annotations

import atexit
import os
import threading
import warnings
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Literal

from kvpact.errors import StoreError, StoreFull
from kvpact.stores.base import (
    Blob,
    GCReport,
    Key,
    ManyStore,
    Progress,
    Store,
    StoreStats,
    StoreWarning,
    check_blob,
    check_key,
)


class BackgroundStore(ManyStore):
    """Hands blobs to a thread that writes them to `inner`, in the order in which they came.

    What waits can be read already. A second put of a key that waits replaces the first. A write
    that fails is counted, and raised by the next `flush` or `close`: the first error, with the
    number of them. What waits when the interpreter ends is still written; a killed process loses
    it. A forked process has no such thread: there every call but `close` is a `StoreError`.

    Parameters
    ----------
    inner : Store
        Holds the entries; closed with this one.
    max_pending : int
        Entries that may wait.
    max_pending_bytes : int
        Their bytes; one entry may wait however large it is.
    on_full : str
        What a put does when the queue is full: ``block`` until there is room, or ``refuse`` with
        `StoreFull`, for callers that would rather lose an entry than wait.

    Raises
    ------
    StoreError
        An option is wrong.
    """

    def __init__(
        self,
        inner: Store,
        *,
        max_pending: int = 64,
        max_pending_bytes: int = 256 << 20,
        on_full: Literal["block", "refuse"] = "block",
    ) -> None:
        if max_pending < 1 or max_pending_bytes < 0 or on_full not in ("block", "refuse"):
            raise StoreError(
                f"max_pending={max_pending}, max_pending_bytes={max_pending_bytes}, "
                f"on_full={on_full!r}: at least 1, at least 0, 'block' or 'refuse'"
            )
        self._inner = inner
        self._max_pending, self._max_bytes = max_pending, max_pending_bytes
        self._refuse = on_full == "refuse"
        self._changed = threading.Condition()
        self._waiting: OrderedDict[str, bytes] = OrderedDict()
        self._writing: tuple[str, bytes] | None = None
        self._bytes = 0
        self._first_failure: Exception | None = None
        self._failures = 0
        self._refused = self._hits = 0
        self._closing = False
        self._process = os.getpid()
        self._thread = threading.Thread(target=self._work, name="kvpact-store", daemon=True)
        self._thread.start()
        atexit.register(_finish, weakref.ref(self))

    def __repr__(self) -> str:
        return f"BackgroundStore({self._inner!r})"

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._closing)
                if not self._waiting:
                    return
                self._writing = name, blob = self._waiting.popitem(last=False)
            error: Exception | None = None
            try:
                self._inner.put(name, blob)
            except Exception as failure:  # a third party's store may raise anything
                error = failure
            with self._changed:
                if error is not None:
                    self._failures += 1
                    if self._first_failure is None:
                        self._first_failure = _without_traceback(error)
                self._writing = None
                self._bytes -= len(blob)
                del blob, error
                self._changed.notify_all()

    def put(self, key: Key, blob: Blob) -> None:
        """Queue a blob, copied; see `Store.put` for what `flush` may raise then.

        Raises
        ------
        StoreFull
            The queue is full, with ``on_full="refuse"``.
        """
        name, data = check_key(key), bytes(check_blob(blob))
        with self._opened():
            if self._refuse and not self._room(name, len(data)):
                self._refused += 1
                raise StoreFull(
                    f"{self!r}: {len(self._waiting)} entries wait already; flush, or raise "
                    "max_pending or max_pending_bytes"
                )
            self._changed.wait_for(lambda: self._closing or self._room(name, len(data)))
            self._check_open()
            self._bytes += len(data) - len(self._waiting.get(name, b""))
            self._waiting[name] = data
            self._changed.notify_all()

    def _room(self, name: str, size: int) -> bool:
        count = len(self._waiting) + (self._writing is not None)
        if not count:
            return True
        more = size - len(self._waiting.get(name, b""))
        fits = name in self._waiting or count < self._max_pending
        return fits and self._bytes + more <= self._max_bytes

    @contextmanager
    def _opened(self) -> Iterator[None]:
        # Before the lock, which the thread may have held when its process was forked.
        if os.getpid() != self._process:
            raise StoreError(f"{self!r} is of the process before the fork; open it in this one")
        with self._changed:
            self._check_open()
            yield

    def _check_open(self) -> None:
        if self._closing:
            raise StoreError(f"{self!r} is closed; open it again")

    def _queued(self, name: str) -> bytes | None:
        if name in self._waiting:
            return self._waiting[name]
        return self._writing[1] if self._writing and self._writing[0] == name else None

    def fetch(self, key: Key) -> bytes | None:
        """Return a blob that waits or is stored; see `Store.fetch`."""
        return self._found([key], lambda keys: list(map(self._inner.fetch, keys)))[0]

    def get_many(self, keys: Sequence[Key]) -> list[bytes | None]:
        """Return blobs that wait or are stored; see `Store.get_many`."""
        return self._found(keys, self._inner.get_many)

    def get_unverified(self, keys: Sequence[Key]) -> Sequence[Blob | None]:
        """Return blobs that wait or are stored; see `Store.get_unverified`."""
        return self._found(keys, self._inner.get_unverified)

    def _found(self, keys: Sequence[Key], get: Callable[..., Any]) -> list[bytes | None]:
        names = [check_key(key) for key in keys]
        with self._opened():
            waiting = [self._queued(name) for name in names]
            self._hits += len(waiting) - waiting.count(None)
        rest = [name for name, blob in zip(names, waiting, strict=True) if blob is None]
        stored = iter(get(rest))
        return [next(stored) if blob is None else blob for blob in waiting]

    def contains_many(self, keys: Sequence[Key]) -> list[bool]:
        """Return for each key whether an entry waits or is stored; see `Store.contains_many`."""
        names = [check_key(key) for key in keys]
        with self._opened():
            waits = [self._queued(name) is not None for name in names]
        rest = [name for name, here in zip(names, waits, strict=True) if not here]
        stored = iter(self._inner.contains_many(rest))
        return [here or next(stored) for here in waits]

    def delete(self, key: Key) -> bool:
        """Remove an entry wherever it is; see `Store.delete`."""
        name = check_key(key)
        with self._opened():
            waited = self._waiting.pop(name, None)
            self._bytes -= len(waited or b"")
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._writing is None or self._writing[0] != name)
        return self._inner.delete(name) or waited is not None

    def keys(self) -> Iterator[str]:
        """Iterate over the keys that wait or are stored; see `Store.keys`."""
        with self._opened():
            queued = set(self._waiting) | ({self._writing[0]} if self._writing else set())
        return iter(sorted(queued | set(self._inner.keys())))

    def stats(self) -> StoreStats:
        """Return the inner store's numbers, with what waits, and what was refused as an error."""
        with self._opened():
            pending = len(self._waiting) + (self._writing is not None)
            hits, refused = self._hits, self._refused
        stats = self._inner.stats()
        return replace(
            stats,
            hits=stats.hits + hits,
            errors=stats.errors + refused,
            pending=stats.pending + pending,
        )

    def gc(self, *, verify: bool = False, progress: Progress | None = None) -> GCReport:
        """Wait for the queue, then collect in the inner store; see `Store.gc`."""
        self._drain()
        return self._inner.gc(verify=verify, progress=progress)

    def _drain(self) -> None:
        with self._opened():
            self._changed.wait_for(lambda: not self._waiting and self._writing is None)

    def flush(self) -> None:
        """Wait until everything that waited is stored.

        Raises
        ------
        StoreError
            Writes failed since the last flush; of the first one's class where that is a
            `StoreError`, and with it as cause.
        """
        self._drain()
        self._inner.flush()
        self._raise_failures()

    def _raise_failures(self, closing: Exception | None = None) -> None:
        with self._changed:
            first, count = self._first_failure, self._failures
            self._first_failure, self._failures = None, 0
        if first is not None:
            kind = type(first) if isinstance(first, StoreError) else StoreError
            many = "1 write" if count == 1 else f"{count} writes"
            more = "" if closing is None else f"; then closing failed: {closing}"
            raise kind(f"{many} failed in the background; first: {first}{more}") from first

    def close(self) -> None:
        """Write what waits, end the thread, close the inner store, raise what `flush` would.

        In a forked process it does nothing: what waits is written by the one that put it.
        """
        if os.getpid() != self._process:
            return
        with self._changed:
            if self._closing:
                return
            self._closing = True
            self._changed.notify_all()
        self._thread.join()
        try:
            self._inner.close()
        except Exception as error:
            self._raise_failures(error)
            raise
        self._raise_failures()


def _without_traceback(error: Exception) -> Exception:
    """Return an error without the frames that it and its causes hold, and the blobs in them."""
    todo: list[BaseException | None] = [error]
    seen: set[int] = set()
    while todo:
        one = todo.pop()
        if one is not None and id(one) not in seen:
            seen.add(id(one))
            one.__traceback__ = None
            todo += (one.__cause__, one.__context__)
    return error


def _finish(reference: weakref.ref[BackgroundStore]) -> None:
    store = reference()
    if store is not None:
        try:
            store.close()
        except StoreError as error:
            warnings.warn(f"{error}; close stores before the end", StoreWarning, stacklevel=1)
