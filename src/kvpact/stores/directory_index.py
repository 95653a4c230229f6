"""The index of a `DirectoryStore`: SQLite in WAL mode; one connection a process, one lock."""

from __future__ import annotations

import os
import sqlite3
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple, TypeVar

from kvpact.errors import FormatError
from kvpact.stores.base import StoreWarning
from kvpact.stores.directory_files import Blobs, create_private, lock

T = TypeVar("T")
VERSION = 1
# `totals` saves every put from summing all sizes. `used` counts up: clocks may stand still.
_SCHEMA = """
CREATE TABLE entries (
    key TEXT PRIMARY KEY, file TEXT NOT NULL, size INTEGER NOT NULL,
    created REAL NOT NULL, used INTEGER NOT NULL
) WITHOUT ROWID;
CREATE UNIQUE INDEX by_use ON entries (used);
CREATE TABLE totals (entries INTEGER NOT NULL, bytes INTEGER NOT NULL);
INSERT INTO totals VALUES (0, 0);
CREATE TRIGGER added AFTER INSERT ON entries BEGIN
    UPDATE totals SET entries = entries + 1, bytes = bytes + new.size; END;
CREATE TRIGGER removed AFTER DELETE ON entries BEGIN
    UPDATE totals SET entries = entries - 1, bytes = bytes - old.size; END;
"""
_DAMAGED = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)


class IndexRow(NamedTuple):
    """One entry as the index has it."""

    key: str
    file: str
    size: int
    created: float


class IndexRows:
    """The statements; valid inside `Index.write` and `Index.read` only."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._run = connection.execute

    def get(self, key: str) -> IndexRow | None:
        """Return a key's row."""
        query = "SELECT key, file, size, created FROM entries WHERE key = ?"
        row = self._run(query, (key,)).fetchone()
        return None if row is None else IndexRow(*row)

    def all(self) -> list[IndexRow]:
        """Return every row, the least recently used first."""
        query = "SELECT key, file, size, created FROM entries ORDER BY used"
        return [IndexRow(*row) for row in self._run(query)]

    def put(self, row: IndexRow) -> None:
        """Set a key's row; it is the most recently used one."""
        self._run("DELETE FROM entries WHERE key = ?", (row.key,))
        self._run(
            "INSERT INTO entries SELECT ?, ?, ?, ?, COALESCE(MAX(used), 0) + 1 FROM entries", row
        )

    def touch(self, keys: Iterable[str]) -> None:
        """Make rows the most recently used ones, in this order."""
        for key in keys:
            self._run(
                "UPDATE entries SET used = (SELECT MAX(used) + 1 FROM entries) WHERE key = ?",
                (key,),
            )

    def remove(self, row: IndexRow) -> bool:
        """Remove a row if it still names the same file."""
        query = "DELETE FROM entries WHERE key = ? AND file = ?"
        return self._run(query, (row.key, row.file)).rowcount > 0

    def totals(self) -> tuple[int, int]:
        """Return the number of entries and their bytes."""
        entries, held = self._run("SELECT entries, bytes FROM totals").fetchone()
        return entries, held

    def make_room(self, limit: int) -> list[IndexRow]:
        """Remove the least recently used rows until all take `limit` bytes; return them."""
        removed: list[IndexRow] = []
        query = "SELECT key, file, size, created FROM entries ORDER BY used LIMIT 1"
        while self.totals()[1] > limit and (found := self._run(query).fetchone()):
            removed.append(IndexRow(*found))
            self.remove(removed[-1])
        return removed


class Index:
    """Opens the index when needed, again after a fork, and makes it of `blobs` where it is lost."""

    def __init__(self, folder: Path, blobs: Blobs, patience: float) -> None:
        self.path = folder / "index.sqlite3"
        self._gate = folder / "index.lock"
        self._blobs, self._patience = blobs, patience
        self._connection: sqlite3.Connection | None = None
        self._process, self._inode = os.getpid(), 0
        self._lock = threading.RLock()
        # SQLite's connections must not even be closed in a forked process.
        self._inherited: list[sqlite3.Connection] = []

    def read(self, work: Callable[[IndexRows], T]) -> T:
        """Run `work` on the rows as they are."""
        return self._repaired(lambda: work(IndexRows(self._open())))

    def write(self, work: Callable[[IndexRows], T]) -> T:
        """Run `work` in a transaction that no other writer enters; an error undoes it all."""

        def run() -> T:
            with _transaction(self._open()) as connection:
                return work(IndexRows(connection))

        return self._repaired(run)

    def _repaired(self, run: Callable[[], T]) -> T:
        if self._process != os.getpid():
            self._inherited += [self._connection] if self._connection is not None else []
            self._connection, self._lock = None, threading.RLock()
            self._process = os.getpid()
        with self._lock:
            try:
                return run()
            except sqlite3.DatabaseError as error:
                if getattr(error, "sqlite_errorcode", 0) & 0xFF not in _DAMAGED:
                    raise
                warnings.warn(
                    f"{self.path} is damaged ({error}); made again from the entries",
                    StoreWarning,
                    stacklevel=5,
                )
                self.rebuild()
                return run()

    def rebuild(self) -> None:
        """Make the index again from the files."""
        with self._lock, self._alone():
            opened, inode = self._connection is not None, self._inode
            self.close()
            if opened and self.path.exists() and self.path.stat().st_ino != inode:
                return  # another process was faster
            for suffix in ("", "-wal", "-shm"):
                Path(f"{self.path}{suffix}").unlink(missing_ok=True)

    def checkpoint(self) -> None:
        """Write the log back, so that it takes no room."""
        with self._lock:
            self._open().execute("PRAGMA wal_checkpoint(TRUNCATE)")

    def close(self) -> None:
        """Close the connection; the next call opens another."""
        with self._lock:
            if self._connection is not None and self._process == os.getpid():
                self._connection.close()
                self._connection = None

    def _open(self) -> sqlite3.Connection:
        if self._connection is not None:
            # Another process may have made a new index.
            with suppress(FileNotFoundError):
                if self.path.stat().st_ino == self._inode:
                    return self._connection
            self.close()
        with self._alone():
            with suppress(FileExistsError):
                os.close(create_private(self.path))
            connection = sqlite3.connect(
                self.path, timeout=self._patience, isolation_level=None, check_same_thread=False
            )
            try:
                self._prepare(connection)
            except BaseException:
                connection.close()
                raise
            self._connection, self._inode = connection, self.path.stat().st_ino
        return connection

    def _prepare(self, connection: sqlite3.Connection) -> None:
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = FULL")
        (version,) = connection.execute("PRAGMA user_version").fetchone()
        if version == 0:
            with _transaction(connection):
                for statement in _SCHEMA.replace("\n    ", " ").split(";\n"):
                    connection.execute(statement)
                self._adopt(IndexRows(connection))
                connection.execute(f"PRAGMA user_version = {VERSION}")
        elif version != VERSION:
            raise FormatError(
                f"{self.path} has version {version}; this reads {VERSION}: use another directory"
            )

    def _adopt(self, rows: IndexRows) -> None:
        """Fill an empty index from the files; of two with one key the newer one counts."""
        found = [(self._blobs.describe(file), file) for file in self._blobs.names()]
        known = [(e[1], file, e) for e, file in found if e is not None]
        for created, file, (key, _, size) in sorted(known):
            rows.put(IndexRow(key, file, size, created))

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Keep other processes from opening the index, or making a new one, at the same time."""
        with suppress(FileExistsError):
            os.close(create_private(self._gate))
        handle = os.open(self._gate, os.O_RDWR)
        try:
            lock(handle, wait=True)
            yield
        finally:
            os.close(handle)


@contextmanager
def _transaction(connection: sqlite3.Connection) -> Iterator[sqlite3.Connection]:
    connection.execute("BEGIN IMMEDIATE")
    try:
        yield connection
        connection.execute("COMMIT")
    except BaseException:
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        raise
