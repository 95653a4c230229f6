"""`Store`: digests to bytes, and what all stores share. Stores know nothing of caches."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from os import PathLike
from typing import Any, Self

from kvpact.callable_package import tells_names
from kvpact.errors import BackendUnavailable, DtypeError, StoreError, StoreKeyError

Key = str | bytes
Progress = Callable[[int, int, str], None]
Blob = bytes | bytearray | memoryview
Clock = Callable[[], float]
KEY_PATTERN = "[A-Za-z0-9_-]{1,200}"
_KEY = re.compile(KEY_PATTERN)
_PREFIX = re.compile(r"[A-Za-z0-9_:.-]{0,100}")


class StoreWarning(UserWarning):
    """An entry was damaged, or a store can't be reached: what was asked for is a miss."""


@dataclass(frozen=True, kw_only=True)
class StoreStats:
    """Figures of a store: what it holds, and what this object saw of it.

    Attributes
    ----------
    entries, bytes : int or None
        Entries held, and their bytes with headers. None where the store can't be reached.
    hits, misses : int
        Calls of `get`, through this object. Every other number, too, is this object's.
    evictions : int
        Entries dropped for the byte budget or because they were too old.
    damaged : int
        Entries that failed their checksum, and were removed.
    errors : int
        Operations that failed: a dead server, a full disk, a write in the background.
    pending : int
        Entries that wait to be written.
    """

    entries: int | None
    bytes: int | None
    hits: int
    misses: int
    evictions: int = 0
    damaged: int = 0
    errors: int = 0
    pending: int = 0


@dataclass(frozen=True, kw_only=True)
class GCReport:
    """The entries and bytes that `Store.gc` removed.

    Attributes
    ----------
    expired, evicted, damaged : int
        Entries that were too old, over the byte budget, or failed their checksum.
    leftovers : int
        Files of writers that were killed, and index rows without a file.
    freed : int
        Bytes.
    """

    expired: int = 0
    evicted: int = 0
    damaged: int = 0
    leftovers: int = 0
    freed: int = 0


def check_store(store: object) -> None:
    """Refuse the name of a store in its place."""
    if isinstance(store, str | PathLike):
        raise StoreError(f"a store is no name; write: kvpact.stores.open_store({str(store)!r})")


class Store(ABC):
    """Holds blobs under keys. Every method may be called from any thread.

    A key is a digest: bytes (1 to 100, stored as their hex), or a string of 1 to 200 characters out
    of ``A-Z a-z 0-9 _ -``; anything else is a `StoreKeyError`. A blob is any bytes, empty ones too.

    A store may forget: what was put may be gone, dropped for the byte budget, its age or damage.
    It never gives wrong bytes: an entry that fails its checksum is a miss, counted, removed, and
    said in a `StoreWarning`.
    """

    @abstractmethod
    def put(self, key: Key, blob: Blob) -> None:
        """Store `blob` under `key`, in place of what was there.

        Raises
        ------
        StoreFull
            No room on disk, or the entry alone is larger than the byte budget.
        StoreUnavailable
            The store's server can't be reached.
        StoreError
            The store is closed, or could not write. After any error what was stored is as before.
        """

    @abstractmethod
    def get(self, key: Key) -> bytes | None:
        """Return the blob under `key`, verified, or None.

        A damaged entry and a server that can't be reached are misses with a `StoreWarning`.
        """

    def fetch(self, key: Key) -> bytes | None:
        """Return the blob under `key`, verified, or None; tell damage and outages from misses.

        A store that can't tell them apart, as this one, answers as `get` does.

        Raises
        ------
        IntegrityError
            The entry failed its checksum, and was removed.
        StoreError
            The store can't be read.
        """
        return self.get(key)

    @abstractmethod
    def contains(self, key: Key) -> bool:
        """Return whether there is an entry; its bytes are not read. A dead server is a False."""

    def get_many(self, keys: Sequence[Key]) -> list[bytes | None]:
        """Return what `get` does, of each key; a store at a distance is asked once for all.

        Keys are read in the order given, the last one is the latest used. All blobs are in memory
        at once.
        """
        return [self.get(key) for key in keys]

    def get_unverified(self, keys: Sequence[Key]) -> Sequence[Blob | None]:
        """Return what `get_many` does, for callers that check every byte of a blob themselves."""
        return self.get_many(keys)

    def contains_many(self, keys: Sequence[Key]) -> list[bool]:
        """Return what `contains` does, of each key; a store at a distance is asked once for all."""
        return [self.contains(key) for key in keys]

    @abstractmethod
    def delete(self, key: Key) -> bool:
        """Remove an entry and return whether there was one."""

    @abstractmethod
    def keys(self) -> Iterator[str]:
        """Iterate over the keys there are now, in no order."""

    @abstractmethod
    def stats(self) -> StoreStats:
        """Return what is held and what happened; never raises for a dead server."""

    @abstractmethod
    def gc(self, *, verify: bool = False, progress: Progress | None = None) -> GCReport:
        """Remove what is too old, over the budget, or left by writers that were killed.

        Parameters
        ----------
        verify : bool
            Read every entry, and remove those that fail their checksum.
        progress : callable, optional
            Called as ``progress(done, total, key)`` for every entry read.
        """

    @abstractmethod
    def flush(self) -> None:
        """Wait until everything put is stored, and raise what went wrong in the background."""

    @abstractmethod
    def close(self) -> None:
        """Flush and release files, connections and threads; a second call does nothing."""

    def __contains__(self, key: Key) -> bool:
        return self.contains(key)

    def __iter__(self) -> Iterator[str]:
        return self.keys()

    def __len__(self) -> int:
        return sum(1 for _ in self.keys())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


_MEANT = {"__setitem__": "store.put(key, blob)", "__getitem__": "store.get(key)"}
tells_names(_MEANT)(Store)  # type: ignore[type-abstract]


class ManyStore(Store):
    """A store that is asked for many keys at once, also for one."""

    def get(self, key: Key) -> bytes | None:
        """Return a blob; see `Store.get`."""
        return self.get_many([key])[0]

    def contains(self, key: Key) -> bool:
        """Return whether there is an entry; see `Store.contains`."""
        return self.contains_many([key])[0]


def check_key(key: Key) -> str:
    """Return a key as the string under which it is stored. Raises `StoreKeyError`."""
    name = bytes(key).hex() if isinstance(key, bytes | bytearray) else key
    if not isinstance(name, str) or not is_key(name):
        shown = repr(key) if len(repr(key)) < 80 else f"{repr(key)[:80]}..."
        raise StoreKeyError(
            f"{shown} is no key: 1 to 100 bytes, or 1 to 200 of the characters A-Z a-z 0-9 _ -"
        )
    return name


def is_key(name: str) -> bool:
    """Return whether an entry may be stored under this string."""
    return bool(_KEY.fullmatch(name))


def check_prefix(prefix: str) -> str:
    """Return what stands in front of every key on a server. Raises `StoreError`."""
    if not isinstance(prefix, str) or not _PREFIX.fullmatch(prefix):
        raise StoreError(f"prefix={prefix!r}: up to 100 of the characters A-Z a-z 0-9 _ - : .")
    return prefix


def check_blob(blob: Blob) -> memoryview:
    """Return a flat view of the bytes to be stored. Raises `DtypeError`."""
    if isinstance(blob, bytes | bytearray | memoryview):
        view = memoryview(blob)
        if view.contiguous:
            return view.cast("B") if view.nbytes else memoryview(b"")
    raise DtypeError(f"a blob is bytes, bytearray or a contiguous memoryview, not {type(blob)}")


def optional(module: str, extra: str) -> Any:
    """Import a package that only some stores need. Raises `BackendUnavailable`."""
    try:
        return import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        raise BackendUnavailable(f"{package} missing: pip install 'kvpact[{extra}]'") from error
