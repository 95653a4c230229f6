"""`DirectoryStore`: one file an entry, and an index; for any number of processes of a machine."""

from __future__ import annotations

import errno
import json
import os
import shutil
import sqlite3
import stat
import threading
import time
import warnings
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from os import PathLike
from pathlib import Path

from kvpact.errors import FormatError, StoreError, StoreFull
from kvpact.files import read_regular
from kvpact.stores.base import Clock, GCReport, StoreWarning
from kvpact.stores.directory_files import Blobs
from kvpact.stores.directory_index import Index, IndexRow, IndexRows
from kvpact.stores.record_store import RecordStore

_MARKER = "kvpact-store.json"
_FORMAT = {"format": "kvpact.store", "version": 1}
_SQLITE = ("", "-wal", "-shm", "-journal")  # the last one while another process makes the index
_OURS = ("blobs", "tmp", "index.lock", *(f"index.sqlite3{suffix}" for suffix in _SQLITE))
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_USES_KEPT = 256  # reads remembered before the index records in what order entries were used


class DirectoryStore(RecordStore):
    """Entries in a directory of a local file system, shared by processes.

    A put writes a file aside, syncs it, renames it and commits a row of the index: afterwards the
    entry outlives the process and a power cut, before it nobody sees it. What a killed writer left
    is removed by `gc`. A lost or damaged index is made again from the files; of entries deleted
    meanwhile none comes back. Folders are 0700, files 0600.

    Parameters
    ----------
    path : path
        A directory; made where it is missing. One that holds something else is refused.
    max_bytes : int, optional
        Bytes of all entries; a put drops the least recently used ones of any process. Reads count
        as uses when they reach the index: with the next put, `flush`, or after 256 of them.
    ttl : float, optional
        Seconds after which an entry is gone.
    clock : callable
        Gives seconds; processes should agree on it.
    patience : float
        Seconds to wait for another process's transaction before it is a `StoreError`.
    create : bool
        Make the directory into a store where it is none; else that is a `StoreError`.

    Raises
    ------
    StoreError
        The directory can't be made or read, or holds something else.
    FormatError
        It was made by a later version.

    Warns
    -----
    StoreWarning
        Every user of the machine can write to the directory.
    """

    def __init__(
        self,
        path: str | PathLike[str],
        *,
        max_bytes: int | None = None,
        ttl: float | None = None,
        clock: Clock = time.time,
        patience: float = 30.0,
        create: bool = True,
    ) -> None:
        super().__init__(ttl=ttl, max_bytes=max_bytes, clock=clock)
        self.path = Path(path).expanduser().absolute()
        self._files = Blobs(self.path)
        self._index = Index(self.path, self._files, patience)
        self._used: OrderedDict[str, None] = OrderedDict()
        self._used_lock = threading.Lock()
        with self._named_errors():
            self._prepare(create)

    def __repr__(self) -> str:
        return f"DirectoryStore({str(self.path)!a})"

    def _prepare(self, create: bool) -> None:
        marker = self.path / _MARKER
        if not create and not marker.exists():
            raise StoreError(f"{self.path} is no store")
        self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        if self.path.stat().st_mode & stat.S_IWOTH and os.name == "posix":
            warnings.warn(
                f"{self.path} can be written to by every user of this machine, who can remove or "
                "replace entries; chmod 700 it",
                StoreWarning,
                stacklevel=3,
            )
        if marker.exists():
            try:
                found = json.loads(read_regular(marker))
            except (ValueError, FormatError):
                found = None
            if found != _FORMAT:
                raise FormatError(f"{marker} says {found}, not {_FORMAT}: use another directory")
        else:
            names = (path.name for path in self.path.iterdir())
            if strange := [n for n in names if n not in _OURS and not n.startswith(_MARKER)]:
                raise StoreError(f"{self.path} holds {strange[0]!r} and is no store; name another")
            self._files.create()
            with self._files.written(json.dumps(_FORMAT).encode(), memoryview(b"")) as written:
                os.replace(written, marker)
        self._files.create()

    def rebuild(self) -> None:
        """Make the index again from the files."""
        self._check_open()
        with self._named_errors():
            self._index.rebuild()

    def _write(self, name: str, head: bytes, blob: memoryview, created: float) -> None:
        size = len(head) + blob.nbytes
        dropped: list[IndexRow] = []
        file = ""
        with self._named_errors(), self._files.written(head, blob) as written:

            def publish(rows: IndexRows) -> list[IndexRow]:
                nonlocal file
                rows.touch(self._take_used())
                old = rows.get(name)
                file = file or self._files.publish(written, name)
                rows.put(IndexRow(name, file, size, created))
                removed = [old] if old is not None else []
                if self._max_bytes is not None:
                    removed += rows.make_room(self._max_bytes)
                return removed

            try:
                dropped = self._index.write(publish)
            except BaseException:
                if file:
                    self._files.remove(file)
                raise
        # Not before the commit: without it they are still there.
        for row in dropped:
            if row.file != file:
                self._files.remove(row.file)
        self._count("evictions", sum(row.key != name for row in dropped))

    def _take_used(self) -> list[str]:
        with self._used_lock:
            used = list(self._used)
            self._used.clear()
        return used

    def _flush(self) -> None:
        if used := self._take_used():
            # A full disk costs the order of use, nothing else.
            with suppress(StoreError), self._named_errors():
                self._index.write(lambda rows: rows.touch(used))

    def _read(self, name: str, *, use: bool = True) -> tuple[bytes, IndexRow] | None:
        with self._named_errors():
            row = self._row(name)
            while row is not None:
                record = self._files.read(row.file)
                if record is not None:
                    break
                # Replaced or dropped meanwhile; or a row without its file.
                last, row = row, self._row(name)
                if row is not None and row.file == last.file:
                    self._discard(name, row)
                    return None
            else:
                return None
        if use:
            with self._used_lock:
                self._used[name] = None
                self._used.move_to_end(name)
                many = len(self._used) >= _USES_KEPT
            if many:
                self._flush()
        return record, row

    def _row(self, name: str) -> IndexRow | None:
        try:
            return self._index.read(lambda rows: rows.get(name))
        except sqlite3.Error:
            # No room to open the index: reads go on without it.
            if not (files := self._files.of_key(name)):
                return None
            found = self._files.describe(files[0])
            return None if found is None else IndexRow(name, files[0], found[2], found[1])

    def _discard(self, name: str, token: IndexRow) -> None:
        with suppress(StoreError), self._named_errors():
            self._remove(token)

    def _remove(self, row: IndexRow) -> bool:
        # The file goes first: room for the index to say so, and no way back for a deleted entry.
        freed = self._files.remove(row.file)
        return self._index.write(lambda rows: rows.remove(row)) or bool(freed)

    def _contains(self, name: str) -> bool:
        with self._named_errors():
            row = self._row(name)
            return row is not None and not self._expired(row.created) and self._has(row)

    def _has(self, row: IndexRow) -> bool:
        return self._files.exists(row.file)

    def _delete(self, name: str) -> bool:
        with self._named_errors():
            row = self._row(name)
            if row is None:
                return False
            held = not self._expired(row.created) and self._has(row)
            return self._remove(row) and held

    def _names(self) -> Iterator[str]:
        with self._named_errors():
            rows = self._index.read(lambda rows: rows.all())
        return iter([row.key for row in rows if not self._expired(row.created)])

    def _held(self) -> tuple[int, int]:
        with self._named_errors():
            return self._index.read(lambda rows: rows.totals())

    def _collect(self) -> GCReport:
        with self._named_errors():
            leftovers, freed = self._files.sweep()
            files = set(self._files.names())

            def collect(rows: IndexRows) -> tuple[list[IndexRow], list[IndexRow], list[str], int]:
                # Files are renamed inside the transactions of puts. So one that was there before
                # this transaction began, and has no row now, has no writer any more.
                rows.touch(self._take_used())
                known = rows.all()
                lost = [row for row in known if row.file not in files and not self._has(row)]
                old = [row for row in known if self._expired(row.created)]
                for row in (*lost, *old):
                    rows.remove(row)
                over = rows.make_room(self._max_bytes) if self._max_bytes is not None else []
                return old, over, sorted(files - {row.file for row in known}), len(lost)

            old, over, orphans, lost = self._index.write(collect)
            gone = [self._files.remove(file) for file in orphans]
            freed += sum(gone)
            freed += sum(self._files.remove(row.file) for row in (*old, *over))
            self._index.checkpoint()
        self._count("evictions", len(old) + len(over))
        leftovers += sum(size > 0 for size in gone) + lost
        return GCReport(expired=len(old), evicted=len(over), leftovers=leftovers, freed=freed)

    def _close(self) -> None:
        self._index.close()

    @contextmanager
    def _named_errors(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as error:
            code = getattr(error, "sqlite_errorcode", 0) & 0xFF
            full = code == sqlite3.SQLITE_IOERR and shutil.disk_usage(self.path).free < 1 << 20
            if full or code == sqlite3.SQLITE_FULL:
                raise StoreFull(self._no_room(error)) from error
            if code == sqlite3.SQLITE_BUSY:
                raise StoreError(f"{self!r}: another process holds the index too long") from error
            raise StoreError(f"{self!r}: the index failed: {error}") from error
        except OSError as error:
            if error.errno in _NO_ROOM:
                raise StoreFull(self._no_room(error)) from error
            raise StoreError(f"{self!r}: {error}") from error

    def _no_room(self, error: Exception) -> str:
        return f"{self!r}: no room ({error}); delete entries, set max_bytes, or free the disk"
