"""`MooncakeStore`: entries in the memory of a Mooncake cluster (``kvpact[mooncake]``)."""

from __future__ import annotations

import threading
import time
import warnings
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from typing import Any, NoReturn

from kvpact.errors import (
    BackendUnavailable,
    StoreError,
    StoreFull,
    StoreUnavailable,
)
from kvpact.stores.base import KEY_PATTERN, Clock, GCReport, StoreWarning, check_prefix
from kvpact.stores.mooncake_client import LANES, CannotStart, MooncakeClient, NoAnswer
from kvpact.stores.mooncake_url import Options, local_address, options_of
from kvpact.stores.record_store import AgedStore, Found, Outage
from kvpact.stores.records import LONGEST_HEADER

_NO_ROOM, _INVALID, _NOT_READY, _MISSING = -200, -600, -703, -704
_UNREACHABLE = {
    -800: "a peer that holds or takes the entry",
    -900: "the master",
    -901: "the master",
}


class MooncakeStore(AgedStore):
    """Entries in the memory that the processes of a Mooncake cluster give to it.

    A master knows which entry lies where; bytes go from process to process over TCP. What a
    process gave is gone when it ends, with the entries there. `segment_size` is what this store
    gives, nothing by default; then others have to: ``mooncake_client``, or another store.
    Where the cluster is full, the master drops entries, those used longest ago first, and refuses
    with `StoreFull` while all were used a moment ago.

    The client is a process of its own, which ends with the store: it can be waited for with a
    deadline, and its ports lead to no memory but the entries'. **Mooncake has neither TLS nor
    passwords, and the ports of a client are open on every address of its machine**: whoever
    reaches them can read and change entries. A changed one is a miss; `EncryptedStore` keeps them
    from being read and forged. Beyond one machine, use a network of one's own.

    A master that is away, a peer that is gone, and a call that takes longer than `timeout` are
    misses with a `StoreWarning` for `get` and `contains`, and a `StoreUnavailable` for everything
    else; after that no call asks again for `retry_after` seconds. An entry that is replaced, or
    removed, goes at once, although Mooncake leases it to its last reader for some seconds; who
    reads at that moment has a miss. If a put that replaces finds no room, the entry is lost.

    Parameters
    ----------
    url : str
        ``mooncake://host:port`` of the master. The arguments up to `timeout` may stand in its
        query, too, as in ``?segment_size=4GiB&buffer_size=512MiB``.
    segment_size : int or str
        Bytes of memory given to the cluster; 0, or 16 MiB and more.
    buffer_size : int or str
        Bytes shared with the client's process, of which those that entries reach are used: four
        blobs can move at once, so the largest entry is a quarter.
    admin : str, optional
        ``host:port`` or the port of the master's HTTP server (its ``--metrics_port``), which
        alone can list keys: for `keys`, `stats` and `gc`. By default the master's host, 9003.
    hostname : str, optional
        Name or address under which peers reach this machine; by default that from which this
        machine reaches the master.
    prefix : str
        Stands in front of every key. Objects in the cluster under a name that is a key are
        taken for entries: `gc` with ``verify=True`` removes what is damaged.
    timeout : float
        Seconds for each call, a whole entry's bytes included.
    retry_after : float
        Seconds for which a cluster that failed is not asked again.
    ttl : float, optional
        Seconds after which an entry is gone; read from the entry, so `contains`, `keys` and `gc`
        read its first bytes.
    log : str, optional
        File to which what Mooncake prints is appended.
    clock : callable
        Gives seconds, for `ttl`.

    Raises
    ------
    BackendUnavailable
        Mooncake is not installed, or lacks a library of the system.
    StoreError
        URL or arguments are wrong. A master that is away is a `StoreWarning` only.
    """

    def __init__(
        self,
        url: str,
        *,
        segment_size: int | str | None = None,
        buffer_size: int | str | None = None,
        admin: str | int | None = None,
        hostname: str | None = None,
        prefix: str | None = None,
        timeout: float | str | None = None,
        retry_after: float = 5.0,
        ttl: float | None = None,
        log: str | None = None,
        clock: Clock = time.time,
    ) -> None:
        super().__init__(ttl=ttl, clock=clock)
        self._options: Options = options_of(
            url,
            segment_size=segment_size,
            buffer_size=buffer_size,
            admin=admin,
            hostname=hostname,
            prefix=prefix,
            timeout=timeout,
        )
        check_prefix(self._options.prefix)
        self._timeout, self._log = self._options.timeout, log
        self._outage = Outage(retry_after)
        self._starting = threading.Lock()
        self._client: MooncakeClient | None = None
        if log is not None:
            try:
                open(log, "ab").close()
            except OSError as error:
                raise StoreError(f"log={log!r} can't be written: {error}") from error
        if find_spec("mooncake") is None:
            raise BackendUnavailable("mooncake missing: pip install 'kvpact[mooncake]'")
        try:
            self._joined()
        except StoreUnavailable as error:
            warnings.warn(f"{error}; taken as a miss", StoreWarning, stacklevel=2)

    def __repr__(self) -> str:
        return f"MooncakeStore({str(self._options.master)!a})"

    def _joined(self) -> MooncakeClient:
        """Return a client of the cluster; start one where there is none or it has ended."""
        self._outage.check()
        with self._starting:
            if self._client is not None and self._client.alive:
                return self._client
            self._outage.check()  # another thread may have failed while this one waited
            self._client = None
            try:
                self._client = self._start()
            except (NoAnswer, OSError) as error:
                self._away("the master does not answer", error)
            except CannotStart as error:
                raise BackendUnavailable(
                    f"mooncake can't be imported: {error}; Debian has the libraries of the system "
                    "that it needs as libibverbs1 and libnuma1"
                ) from error
            return self._client

    def _start(self) -> MooncakeClient:
        options = self._options
        hostname = options.hostname or local_address(options.master, self._timeout)
        setup = {
            "local_hostname": hostname,
            "metadata_server": "P2PHANDSHAKE",
            "global_segment_size": options.segment_size,
            "local_buffer_size": 0,
            "protocol": "tcp",
            "rdma_devices": "",
            "master_server_addr": str(options.master),
        }
        settings = {"setup": setup, "prefix": options.prefix, "key": KEY_PATTERN}
        return MooncakeClient(settings, options.buffer_size, self._timeout, self._log)

    def _away(self, what: str, cause: Exception | None = None) -> NoReturn:
        detail = "" if cause is None else f" ({cause})"
        self._outage.begin(f"{self!r}: {what}{detail}", cause)

    def _call(self, operation: str, *arguments: Any) -> Any:
        """Return the result of a method of `MooncakeClient`; its errors get their names."""
        client = self._joined()
        try:
            result = getattr(client, operation)(self._timeout, *arguments)
        except NoAnswer as error:
            self._away("no answer in time", error)
        if isinstance(result, int) and result in _UNREACHABLE:
            self._away(f"{_UNREACHABLE[result]} does not answer", _mooncake_error(result))
        return result

    def _refused(self, code: int) -> NoReturn:
        raise StoreError(f"{self!r}: {_mooncake_error(code)}")

    def _read(self, name: str, *, use: bool = True) -> tuple[bytes, None] | None:
        found = self._call("get", name)
        if isinstance(found, bytes):
            return found, None
        if found in (_MISSING, _NOT_READY):  # not there, or not yet
            return None
        if found == _INVALID:
            raise StoreError(
                f"{self!r}: the entry is larger than a quarter of "
                f"buffer_size={self._options.buffer_size}"
            )
        self._refused(found)

    def _read_many(self, names: Sequence[str]) -> list[Found]:
        one = super()._read_many  # as many at once as there are parts of the buffer
        with ThreadPoolExecutor(LANES) as pool:
            return [found for (found,) in pool.map(lambda name: one([name]), names)]

    def _write(self, name: str, head: bytes, blob: memoryview, created: float) -> None:
        size, largest = len(head) + blob.nbytes, self._options.buffer_size // LANES
        if size > largest:
            raise StoreFull(
                f"{self!r}: an entry of {size} bytes; a quarter of "
                f"buffer_size={self._options.buffer_size} is the largest"
            )
        code = self._call("put", name, head, blob)
        if code == _NO_ROOM:
            raise StoreFull(
                f"{self!r}: no process of the cluster has room for {size} bytes; segment_size= "
                "gives some of this one's"
            )
        if code == _NOT_READY:
            raise StoreError(f"{self!r}: another process began to store {name} and does not end")
        if code:
            self._refused(code)

    def _discard(self, name: str, token: None) -> None:
        # Another process may put a good one in between; then that is a miss, too.
        self._remove(name)

    def _remove(self, name: str) -> bool:
        code = self._call("ask", "remove", name)
        if code not in (0, _MISSING, _NOT_READY):
            self._refused(code)
        return bool(code == 0)

    def _contains_many(self, names: Sequence[str]) -> list[bool]:
        with ThreadPoolExecutor(LANES) as pool:
            return list(pool.map(self._contains, names))

    def _exists(self, name: str) -> bool:
        code = self._call("ask", "exists", name)
        if code not in (0, 1):
            self._refused(code)
        return bool(code)

    def _head(self, name: str) -> tuple[bytes, int] | None:
        found: tuple[bytes, int] | int = self._call("head", name, LONGEST_HEADER)
        if not isinstance(found, int):
            return found
        if found in (_MISSING, _NOT_READY):
            return None
        self._refused(found)

    def _delete(self, name: str) -> bool:
        held = self._ttl is None or self._contains(name)
        return self._remove(name) and held

    def _listed(self, operation: str) -> Any:
        """Ask the master's HTTP server, by way of the client's process."""
        admin = self._options.admin
        found = self._call("ask", operation, admin.host, admin.port, self._timeout)
        if isinstance(found, str):
            raise StoreUnavailable(
                f"{self!r}: {admin} does not list keys ({found}); admin= is the port of the "
                "master's HTTP server"
            )
        return found

    def _names(self) -> Iterator[str]:
        found: list[str] = self._listed("names")
        return iter([n for n in found if self._ttl is None or self._contains(n)])

    def _held(self) -> tuple[int, int]:
        entries, held = self._listed("held")
        return entries, held

    def _collect(self) -> GCReport:
        if self._ttl is None:  # the master drops entries by itself; that it is there is asked for
            self._call("ask", "exists", "-")
            return GCReport()
        count = 0
        before: int = self._listed("held")[1]
        for name in self._listed("names"):
            if self._young(name) is False:
                count += self._remove(name)
        self._count("evictions", count)
        freed = before - self._listed("held")[1] if count else 0
        return GCReport(expired=count, freed=max(freed, 0))

    def _close(self) -> None:
        with self._starting:
            if self._client is not None:
                self._client.close()


def _mooncake_error(code: int) -> StoreError:
    return StoreError(f"Mooncake's error {code}")
