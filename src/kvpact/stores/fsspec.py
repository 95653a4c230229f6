"""`FsspecStore`: entries in whatever fsspec has a file system for (``kvpact[remote]``)."""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from kvpact.errors import StoreError
from kvpact.stores.base import Clock, GCReport, is_key, optional
from kvpact.stores.record_store import AgedStore, Found
from kvpact.stores.records import LONGEST_HEADER

_SUFFIX = ".kvr"
_ASIDE = ".part"
_RENAMES = {"file", "local", "sftp", "ssh", "smb", "hdfs", "ftp"}
_ABANDONED = 86_400.0  # seconds after which nobody writes to a file aside any more


class FsspecStore(AgedStore):
    """One object an entry, named by its key, under a URL such as ``s3://bucket/folder``.

    An object store publishes an object whole; on file systems an entry is written aside and
    renamed. Where neither holds, an entry cut by a crash is a miss, as a damaged one is. There is
    no byte budget: object stores have rules for that. Timeouts are the file system's; give them in
    `options`. A `DirectoryStore` is faster and safer for local files.

    Parameters
    ----------
    url : str
        What fsspec takes; its package (``s3fs``, ``gcsfs``, …) has to be installed.
    ttl : float, optional
        Seconds after which an entry is gone; read from the entry, so `contains` and `gc` read
        its first bytes.
    clock : callable
        Gives seconds.
    **options
        For the file system: credentials, endpoints, timeouts.

    Raises
    ------
    BackendUnavailable
        fsspec, or what it needs for this URL, is not installed.
    StoreError
        It knows no such file system, or can't open it.
    """

    def __init__(
        self, url: str, *, ttl: float | None = None, clock: Clock = time.time, **options: Any
    ) -> None:
        super().__init__(ttl=ttl, clock=clock)
        core = optional("fsspec.core", "remote")
        self._url = url
        try:
            self._fs, self._root = core.url_to_fs(url, **options)
        except Exception as error:  # every file system has errors of its own
            raise self._named(error, "can't be opened, ") from _shown_cause(error)
        self._root = self._root.rstrip("/")
        self._magic = any(sign in self._root for sign in "*?[")  # `cat` would look for others

    def __repr__(self) -> str:
        # Credentials may stand between :// and @, and after the ? of a signed URL.
        scheme, _, rest = self._url.partition("://")
        rest, _, query = rest.partition("?")
        rest = "..." if "@" in query else rest.rpartition("@")[2]  # ...: a password with a ? in it
        return f"FsspecStore({scheme + '://' + rest!a})"

    def _named(self, error: Exception, what: str = "") -> StoreError:
        return StoreError(f"{self!r}: {what}{type(error).__name__}: {_shown(error)}")

    @contextmanager
    def _named_errors(self) -> Iterator[None]:
        try:
            yield
        except (StoreError, FileNotFoundError):
            raise
        except Exception as error:  # as above
            raise self._named(error) from _shown_cause(error)

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}{_SUFFIX}"

    def _read(self, name: str, *, use: bool = True) -> tuple[bytes, None] | None:
        try:
            with self._named_errors():
                return bytes(self._fs.cat_file(self._path(name))), None
        except FileNotFoundError:
            return None

    def _read_many(self, names: Sequence[str]) -> list[Found]:
        if self._magic:
            return super()._read_many(names)
        paths = [self._path(name) for name in names]
        with self._named_errors():
            records = self._fs.cat(paths, on_error="return") if paths else {}
        return [self._record(records.get(path)) for path in paths]

    def _record(self, given: object) -> tuple[bytes, None] | StoreError | None:
        if given is None or isinstance(given, FileNotFoundError):
            return None
        return self._named(given) if isinstance(given, Exception) else (bytes(given), None)  # type: ignore[call-overload]

    def _write(self, name: str, head: bytes, blob: memoryview, created: float) -> None:
        record = b"".join((head, blob))
        try:
            with self._named_errors():
                self._publish(name, record)
        except FileNotFoundError:
            with self._named_errors():
                self._fs.makedirs(self._root, exist_ok=True)
                self._publish(name, record)

    def _publish(self, name: str, record: bytes) -> None:
        protocol = self._fs.protocol
        if _RENAMES.isdisjoint((protocol,) if isinstance(protocol, str) else protocol):
            self._fs.pipe_file(self._path(name), record)
            return
        aside = f"{self._root}/{int(time.time())}-{secrets.token_hex(8)}{_ASIDE}"
        try:
            self._fs.pipe_file(aside, record)
            self._fs.mv(aside, self._path(name))
        except BaseException:
            with suppress(Exception):
                self._fs.rm_file(aside)
            raise

    def _discard(self, name: str, token: None) -> None:
        with suppress(FileNotFoundError), self._named_errors():
            self._fs.rm_file(self._path(name))

    def _contains_many(self, names: Sequence[str]) -> list[bool]:
        if self._ttl is not None:
            return super()._contains_many(names)
        paths = [self._path(name) for name in names]
        with self._named_errors():
            found = self._fs.cat_ranges(
                paths, [0] * len(paths), [1] * len(paths), on_error="return"
            )
        for one in found:
            if isinstance(one, Exception) and not isinstance(one, FileNotFoundError):
                raise self._named(one) from _shown_cause(one)
        return [not isinstance(one, Exception) for one in found]

    def _exists(self, name: str) -> bool:
        with self._named_errors():
            return bool(self._fs.exists(self._path(name)))

    def _head(self, name: str) -> tuple[bytes, int] | None:
        path = self._path(name)
        try:
            with self._named_errors():
                head = self._fs.cat_file(path, start=0, end=LONGEST_HEADER)
                return head, int(self._fs.size(path))
        except FileNotFoundError:
            return None

    def _delete(self, name: str) -> bool:
        held = self._contains(name)
        self._discard(name, None)
        return held

    def _files(self) -> dict[str, int]:
        """Return the size of every file of the folder, by its name."""
        with self._named_errors():
            self._fs.invalidate_cache()
            try:
                found = self._fs.find(self._root, maxdepth=1, detail=True)
            except FileNotFoundError:
                return {}
            return {str(p).rpartition("/")[2]: int(i.get("size") or 0) for p, i in found.items()}

    def _found(self) -> dict[str, int]:
        sizes = {}
        for file, size in self._files().items():
            if file.endswith(_SUFFIX) and is_key(name := file.removesuffix(_SUFFIX)):
                sizes[name] = size
        return sizes

    def _names(self) -> Iterator[str]:
        return iter([n for n in self._found() if self._ttl is None or self._contains(n)])

    def _held(self) -> tuple[int, int]:
        found = self._found()
        return len(found), sum(found.values())

    def _collect(self) -> GCReport:
        count = freed = leftovers = 0
        for file, size in self._files().items():
            begun = re.fullmatch(rf"(\d{{1,12}})-[0-9a-f]{{16}}{re.escape(_ASIDE)}", file)
            if begun and time.time() - int(begun[1]) > _ABANDONED:
                with suppress(FileNotFoundError), self._named_errors():
                    self._fs.rm_file(f"{self._root}/{file}")
                leftovers, freed = leftovers + 1, freed + size
        for name, size in self._found().items() if self._ttl is not None else ():
            if self._young(name) is False:
                self._discard(name, None)
                count, freed = count + 1, freed + size
        self._count("evictions", count)
        return GCReport(expired=count, leftovers=leftovers, freed=freed)


def _shown(error: Exception) -> str:
    """Return an error's text without what URLs in it may hold of credentials."""
    text = re.sub(r"\?[^\s'\"<>]+", "?...", str(error))
    return re.sub(r"://[^\s'\"<>/]*@", "://", text)


def _shown_cause(error: Exception) -> Exception | None:
    """Return the error, for ``from``; None where a traceback would show what `_shown` hides."""
    return error if _shown(error) == str(error) else None
