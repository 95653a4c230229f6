"""The files of a `DirectoryStore`: written aside, synced, renamed; never changed afterwards."""

from __future__ import annotations

import os
import re
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import blake2b
from pathlib import Path

from kvpact.errors import FormatError, IntegrityError
from kvpact.files import open_regular, read_regular, sync_folder
from kvpact.stores.records import LONGEST_HEADER, peek

try:
    import fcntl
except ImportError:  # Windows: no locks, so one process at a time
    fcntl = None  # type: ignore[assignment]

_LOCKS = fcntl is not None
SUFFIX = ".kvr"
_FILE = re.compile(r"[0-9a-f]{2}/[0-9a-f]{32}-[0-9a-f]{16}\.kvr")


def create_private(path: Path) -> int:
    """Open a new file for this user alone; it must not be there yet."""
    return os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR | getattr(os, "O_BINARY", 0), 0o600)


def lock(handle: int, *, wait: bool) -> bool:
    """Take the lock on an open file, which its process loses when it ends in whatever way."""
    if fcntl is not None:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            return False
    return True


class Blobs:
    """Files of a store, named by the hash of their key and a random number, each name used once."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "blobs"
        self.aside = folder / "tmp"

    def create(self) -> None:
        """Make the folders."""
        for folder in (self.folder, self.aside):
            folder.mkdir(mode=0o700, exist_ok=True)
        sync_folder(self.folder.parent)

    @contextmanager
    def written(self, head: bytes, blob: memoryview) -> Iterator[Path]:
        """Yield a synced, locked file with these bytes, gone afterwards if it is not renamed."""
        path, handle = self._aside()
        try:
            for part in (memoryview(head), blob):
                done = 0
                while done < part.nbytes:
                    done += os.write(handle, part[done:])
            os.fsync(handle)
            if not _LOCKS:  # Windows renames no open file
                os.close(handle)
                handle = -1
            yield path
        finally:
            path.unlink(missing_ok=True)
            if handle >= 0:
                os.close(handle)

    def _aside(self) -> tuple[Path, int]:
        while True:
            path = self.aside / secrets.token_hex(16)
            handle = create_private(path)
            # `sweep` may have come between the file and its lock.
            if lock(handle, wait=False) and path.exists():
                return path, handle
            os.close(handle)

    def publish(self, written: Path, key: str) -> str:
        """Give a written file its name, durably, and return that name."""
        file = f"{self._stem(key)}-{secrets.token_hex(8)}{SUFFIX}"
        target = self.folder / file
        if not target.parent.is_dir():
            target.parent.mkdir(mode=0o700, exist_ok=True)
            sync_folder(self.folder)
        os.replace(written, target)
        sync_folder(target.parent)
        return file

    @staticmethod
    def _stem(key: str) -> str:
        digest = blake2b(key.encode(), digest_size=16).hexdigest()
        return f"{digest[:2]}/{digest}"

    def read(self, file: str) -> bytes | None:
        """Return a file's bytes; None where it is gone, empty where it is no regular file."""
        try:
            named = _FILE.fullmatch(file)
            return read_regular(self.folder / file, follow=False) if named else None
        except FileNotFoundError:
            return None
        except FormatError:
            return b""

    def exists(self, file: str) -> bool:
        """Return whether a file is there."""
        return bool(_FILE.fullmatch(file)) and (self.folder / file).is_file()

    def remove(self, file: str) -> int:
        """Remove a file and return how many bytes it had."""
        if not _FILE.fullmatch(file):  # an index that was tampered with removes nothing of others'
            return 0
        try:
            size = (self.folder / file).lstat().st_size
            (self.folder / file).unlink()
        except FileNotFoundError:
            return 0
        return size

    def names(self) -> list[str]:
        """Return every file's name."""
        found = (path.relative_to(self.folder).as_posix() for path in self.folder.glob("*/*"))
        return [name for name in found if _FILE.fullmatch(name)]

    def of_key(self, key: str) -> list[str]:
        """Return the names of a key's files, the newest first."""
        folder, _, stem = self._stem(key).partition("/")
        found = [(p.stat().st_mtime_ns, p.name) for p in (self.folder / folder).glob(f"{stem}-*")]
        return [f"{folder}/{name}" for _, name in sorted(found, reverse=True)]

    def describe(self, file: str) -> tuple[str, float, int] | None:
        """Return key, time and size that a file states; None where it is no whole entry."""
        try:
            handle = open_regular(self.folder / file, follow=False)
            with os.fdopen(handle, "rb") as stream:
                size = os.fstat(stream.fileno()).st_size
                key, created = peek(stream.read(LONGEST_HEADER), size)
        except (OSError, IntegrityError, FormatError):
            return None
        return (key, created, size) if file.startswith(f"{self._stem(key)}-") else None

    def sweep(self) -> tuple[int, int]:
        """Remove what killed writers left in ``tmp``; return how many files and bytes."""
        count = freed = 0
        for path in self.aside.iterdir() if _LOCKS else ():
            # No writer makes folders, links or pipes: what somebody else put here stays.
            try:
                if not stat.S_ISREG(path.lstat().st_mode):
                    continue
                handle = os.open(path, os.O_RDWR | getattr(os, "O_NOFOLLOW", 0))
            except OSError:  # gone meanwhile, or not ours to open
                continue
            try:
                if lock(handle, wait=False):
                    freed += os.fstat(handle).st_size
                    path.unlink(missing_ok=True)
                    count += 1
            finally:
                os.close(handle)
        return count, freed
