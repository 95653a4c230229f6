"""`RecordStore`: what stores that hold records have in common; a store adds where they lie."""

from __future__ import annotations

import threading
import time
import warnings
from abc import abstractmethod
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, NoReturn

from kvpact.errors import FormatError, IntegrityError, StoreError, StoreFull, StoreUnavailable
from kvpact.stores.base import (
    Blob,
    Clock,
    GCReport,
    Key,
    ManyStore,
    Progress,
    StoreStats,
    StoreWarning,
    check_blob,
    check_key,
)
from kvpact.stores.records import RecordEntry, peek, seal, unseal

Found = tuple[bytes, Any] | StoreError | None
"""A record and its token, why it could not be read, or nothing."""


class RecordStore(ManyStore):
    """A store that seals and checks entries; subclasses only move bytes."""

    def __init__(
        self, *, ttl: float | None = None, max_bytes: int | None = None, clock: Clock = time.time
    ) -> None:
        if ttl is not None and not ttl > 0:
            raise StoreError(f"ttl={ttl!r} should be a number of seconds above 0")
        if max_bytes is not None and (type(max_bytes) is not int or max_bytes < 1):
            raise StoreError(f"max_bytes={max_bytes!r} should be a whole number of bytes above 0")
        self._ttl, self._max_bytes, self._clock = ttl, max_bytes, clock
        self._counts: Counter[str] = Counter()
        self._counts_lock = threading.Lock()
        self._closed = False

    # What a store adds. A token stands for one version of an entry, so that what is removed is
    # what was read, and not what another process put there since.

    @abstractmethod
    def _read(self, name: str, *, use: bool = True) -> tuple[bytes, Any] | None:
        """Return the record and its token, or None; `use` says whether it counts as used."""

    def _read_many(self, names: Sequence[str]) -> list[Found]:
        """Return what `_read` does, or why it failed, for each name; stores may do it in one."""
        found: list[Found] = []
        for name in names:
            try:
                found.append(self._read(name))
            except StoreError as error:
                found.append(error)
        return found

    @abstractmethod
    def _write(self, name: str, head: bytes, blob: memoryview, created: float) -> None:
        """Store a record, whole or not at all."""

    @abstractmethod
    def _discard(self, name: str, token: Any) -> None:
        """Remove an entry if it is still the one that was read."""

    @abstractmethod
    def _contains(self, name: str) -> bool: ...

    def _contains_many(self, names: Sequence[str]) -> list[bool]:
        return [self._contains(name) for name in names]

    @abstractmethod
    def _delete(self, name: str) -> bool: ...

    @abstractmethod
    def _names(self) -> Iterator[str]: ...

    @abstractmethod
    def _held(self) -> tuple[int, int]:
        """Return entries and bytes."""

    def _collect(self) -> GCReport:
        """Remove what is too old or over the budget, and what killed writers left."""
        return GCReport()

    def _flush(self) -> None: ...

    def _close(self) -> None: ...

    # The interface.

    def put(self, key: Key, blob: Blob) -> None:
        """Store a blob; see `Store.put`."""
        name, view = check_key(key), check_blob(blob)
        self._check_open()
        created = self._clock()
        head, view = seal(name, view, created)
        try:
            size = len(head) + view.nbytes
            if self._max_bytes is not None and size > self._max_bytes:
                raise StoreFull(
                    f"{self!r}: an entry of {size} bytes does not fit into "
                    f"max_bytes={self._max_bytes}"
                )
            self._write(name, head, view, created)
        except Exception:
            self._count("errors")
            raise

    def get_many(self, keys: Sequence[Key]) -> list[bytes | None]:
        """Return blobs; see `Store.get_many`."""
        return [None if blob is None else bytes(blob) for blob in self._blobs(keys, verify=True)]

    def get_unverified(self, keys: Sequence[Key]) -> Sequence[Blob | None]:
        """Return blobs where they lie in their records; see `Store.get_unverified`."""
        return list(self._blobs(keys, verify=False))

    def _blobs(self, keys: Sequence[Key], *, verify: bool) -> Iterator[memoryview | None]:
        names = [check_key(key) for key in keys]
        found = self._looked_up(names)
        found.reverse()  # each record goes when its blob is there
        for name in names:
            blob = None
            try:
                blob = self._checked(name, found.pop(), verify=verify)
            except IntegrityError as error:
                warnings.warn(str(error), StoreWarning, stacklevel=3)
            except StoreError as error:
                warnings.warn(f"{error}; taken as a miss", StoreWarning, stacklevel=3)
            yield blob

    def fetch(self, key: Key) -> bytes | None:
        """Return a blob; see `Store.fetch`."""
        name = check_key(key)
        blob = self._checked(name, self._looked_up([name])[0])
        return None if blob is None else bytes(blob)

    def _looked_up(self, names: Sequence[str]) -> list[Found]:
        self._check_open()
        try:
            return self._read_many(names) if len(names) > 1 else [self._read(x) for x in names]
        except StoreError as error:
            return [error] * len(names)

    def _checked(self, name: str, found: Found, verify: bool = True) -> memoryview | None:
        """Return the blob of what was read; raise what went wrong."""
        entry = None
        try:
            if isinstance(found, StoreError):
                raise found
            entry = None if found is None else self._verified(name, *found, verify)
        except StoreError:
            self._count("errors")
            raise
        finally:
            self._count("misses" if entry is None else "hits")
        return None if entry is None else entry.blob

    def contains_many(self, keys: Sequence[Key]) -> list[bool]:
        """Return for each key whether there is an entry; see `Store.contains_many`."""
        names, found = [check_key(key) for key in keys], list[bool]()
        self._check_open()
        try:
            if len(names) == 1:
                return [self._contains(names[0])]
            for start in range(0, len(names), _ASKED):
                found += self._contains_many(names[start : start + _ASKED])
        except StoreError as error:
            self._failed(error)
        return found + [False] * (len(names) - len(found))

    def delete(self, key: Key) -> bool:
        """Remove an entry; see `Store.delete`."""
        name = check_key(key)
        self._check_open()
        return self._delete(name)

    def keys(self) -> Iterator[str]:
        """Iterate over the keys; see `Store.keys`."""
        self._check_open()
        return self._names()

    def stats(self) -> StoreStats:
        """Return numbers; see `Store.stats`."""
        self._check_open()
        held: tuple[int | None, int | None] = None, None
        try:
            held = self._held()
        except StoreError as error:
            self._failed(error)
        with self._counts_lock:
            counts = {name: self._counts[name] for name in _COUNTED}
        return StoreStats(entries=held[0], bytes=held[1], **counts)

    def gc(self, *, verify: bool = False, progress: Progress | None = None) -> GCReport:
        """Remove what is of no use; see `Store.gc`."""
        self._check_open()
        report = self._collect()
        names = list(self._names()) if verify else []
        for done, name in enumerate(names, 1):
            if progress is not None:
                progress(done, len(names), name)
            if (found := self._read(name, use=False)) is None:
                continue
            try:
                with suppress(FormatError):  # a later version's, and whole
                    unseal(name, found[0])
            except IntegrityError:
                self._count("damaged")
                self._discard(name, found[1])
                freed = report.freed + len(found[0])
                report = replace(report, damaged=report.damaged + 1, freed=freed)
        return report

    def flush(self) -> None:
        """Store what waits; see `Store.flush`."""
        self._check_open()
        self._flush()

    def close(self) -> None:
        """Release everything; see `Store.close`."""
        if not self._closed:
            try:
                self._flush()
            finally:
                self._closed = True
                self._close()

    # Shared parts.

    def _failed(self, error: StoreError) -> None:
        self._count("errors")
        warnings.warn(f"{error}; taken as a miss", StoreWarning, stacklevel=3)

    def _verified(self, name: str, record: bytes, token: Any, verify: bool) -> RecordEntry | None:
        try:
            entry = unseal(name, record, verify=verify)
        except FormatError as error:
            warnings.warn(f"{self!r}: {error}; taken as a miss", StoreWarning, stacklevel=3)
            return None
        except IntegrityError as error:
            self._count("damaged")
            self._discard(name, token)
            raise IntegrityError(f"{self!r}: {error}; removed") from error
        if self._expired(entry.created):
            self._count("evictions")
            self._discard(name, token)
            return None
        return entry

    def _expired(self, created: float) -> bool:
        return self._ttl is not None and self._clock() - created >= self._ttl

    def _check_open(self) -> None:
        if self._closed:
            raise StoreError(f"{self!r} is closed; open it again")

    def _count(self, name: str, by: int = 1) -> None:
        with self._counts_lock:
            self._counts[name] += by


class AgedStore(RecordStore):
    """A store whose entries alone say how old they are."""

    @abstractmethod
    def _exists(self, name: str) -> bool: ...

    @abstractmethod
    def _head(self, name: str) -> tuple[bytes, int] | None:
        """Return the first `LONGEST_HEADER` bytes and the size of a record, if it is there."""

    def _contains(self, name: str) -> bool:
        return self._young(name) is True

    def _young(self, name: str) -> bool | None:
        """Return whether an entry is young enough; None where there is none."""
        if self._ttl is None:
            return self._exists(name) or None
        found = self._head(name)
        try:
            return None if found is None else not self._expired(peek(*found)[1])
        except (IntegrityError, FormatError):
            return True  # whole or not is for `get` to say


_ASKED = 500
"""Keys of which a store is asked at once."""
_COUNTED = ("hits", "misses", "evictions", "damaged", "errors")


class Outage:
    """Remembers a failure for `retry_after` seconds: an outage costs one timeout in all."""

    def __init__(self, retry_after: float) -> None:
        self._retry_after = retry_after
        self._until, self._reason = 0.0, ""
        self._lock = threading.Lock()

    def check(self) -> None:
        """Go on where the server may be asked. Raises `StoreUnavailable`."""
        with self._lock:
            if time.monotonic() < self._until:
                raise StoreUnavailable(self._reason)

    def begin(self, reason: str, cause: Exception | None = None) -> NoReturn:
        """Ask no server for a while. Always raises `StoreUnavailable`, with this reason."""
        with self._lock:
            self._until, self._reason = time.monotonic() + self._retry_after, reason
        raise StoreUnavailable(reason) from cause
