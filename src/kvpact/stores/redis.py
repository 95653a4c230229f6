"""`RedisStore`: entries on a redis or valkey server. Needs redis-py (``kvpact[redis]``)."""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn
from urllib.parse import parse_qs, urlsplit

from kvpact.errors import StoreError, StoreFull, StoreUnavailable
from kvpact.stores.base import Clock, GCReport, StoreWarning, check_prefix, is_key, optional
from kvpact.stores.record_store import Found, Outage, RecordStore

_LARGEST = 512 << 20  # what a server takes as one value, unless configured otherwise
_BATCH = 500
# Said without redis-py's reason, which quotes what it took for a port: a part of the password.
_WRONG_URL = (
    "the redis URL is wrong: redis://[user:password@]host[:port][/db]; in the password write "
    "/ # ? @ as %2F %23 %3F %40, or give it as password="
)


class RedisStore(RecordStore):
    """Entries on a server; memory and eviction are the server's (``maxmemory``).

    A server that is away is a miss with a `StoreWarning` for `get` and `contains`, and a
    `StoreUnavailable` for everything else. After a failure no call asks again for `retry_after`
    seconds, so that an outage costs one timeout and not one per entry. A refused password is a
    `StoreUnavailable` from the constructor, and afterwards the same as a server that is away.

    Parameters
    ----------
    url : str
        ``redis://[user:password@]host[:port][/db]``, ``rediss://`` for TLS.
    username, password : str, optional
        Instead of those in the URL, which may end up in logs; they never stand in a message.
        In a URL, ``/ # ? @`` of a password are percent-encoded.
    ca_certs, certfile, keyfile : str, optional
        PEM files for ``rediss://``: whom to trust, and a certificate of one's own. The server's
        certificate and name are always checked.
    prefix : str
        Stands in front of every key on the server. Strings there under a name that is a key are
        taken for entries: `gc` with ``verify=True`` removes what is damaged.
    ttl : float, optional
        Seconds after which the server drops an entry.
    timeout : float
        Seconds to wait for a connection, and for each answer.
    retry_after : float
        Seconds for which a server that failed is not asked again.
    clock : callable
        Gives seconds, for `ttl`.

    Raises
    ------
    BackendUnavailable
        redis-py is not installed.
    StoreUnavailable
        The server refuses the password. A server that is away is a `StoreWarning` only.
    StoreError
        URL or prefix is wrong, or the URL has options of TLS or of sockets, which are arguments.
    """

    def __init__(
        self,
        url: str,
        *,
        username: str | None = None,
        password: str | None = None,
        ca_certs: str | None = None,
        certfile: str | None = None,
        keyfile: str | None = None,
        prefix: str = "kvpact:",
        ttl: float | None = None,
        timeout: float = 2.0,
        retry_after: float = 5.0,
        clock: Clock = time.time,
    ) -> None:
        super().__init__(ttl=ttl, clock=clock)
        check_prefix(prefix)
        if not timeout > 0:
            raise StoreError(f"timeout={timeout!r} should be seconds above 0")
        self._prefix, self._outage = prefix, Outage(retry_after)
        self._module = module = optional("redis", "redis")
        self._denied: tuple[type[Exception], ...] = (
            module.AuthenticationError,
            module.exceptions.AuthorizationError,
            module.exceptions.NoPermissionError,
        )
        options: dict[str, Any] = {"username": username, "password": password}
        if url.startswith("rediss://"):
            options |= {
                "ssl_ca_certs": ca_certs,
                "ssl_certfile": certfile,
                "ssl_keyfile": keyfile,
                "ssl_cert_reqs": "required",
                "ssl_check_hostname": True,
            }
        elif not url.startswith(("redis://", "unix://")):
            raise StoreError("the URL should begin with redis://, rediss:// or unix://")
        elif ca_certs or certfile or keyfile:
            raise StoreError("certificates are for TLS: the URL should begin with rediss://")
        _check_url(url)
        self._client = self._connect(
            url, {k: v for k, v in options.items() if v is not None}, timeout
        )
        kwargs = self._client.connection_pool.connection_kwargs
        # redis-py's own defaults, which stand in its arguments only when the URL names them.
        host, port = kwargs.get("host") or "localhost", kwargs.get("port") or 6379
        self._where = str(kwargs.get("path") or f"{host}:{port}")
        try:
            with self._reachable():
                self._client.ping()
        except TypeError:  # redis-py takes options of a URL unseen until it connects
            raise StoreError("the redis URL has an option that redis-py does not know") from None
        except StoreUnavailable as error:
            if isinstance(error.__cause__, self._denied):
                self._client.close()
                raise
            warnings.warn(f"{error}; taken as a miss", StoreWarning, stacklevel=2)

    def _connect(self, url: str, options: dict[str, Any], timeout: float) -> Any:
        no_backoff = optional("redis.backoff", "redis").NoBackoff
        retry = optional("redis.retry", "redis").Retry
        try:
            return self._module.Redis.from_url(
                url,
                **options,
                socket_timeout=timeout,
                socket_connect_timeout=timeout,
                # Once, for connections that a restart of the server has cut.
                retry=retry(no_backoff(), 1, (self._module.ConnectionError,)),
            )
        except (ValueError, TypeError):
            raise StoreError(_WRONG_URL) from None

    def __repr__(self) -> str:
        return f"RedisStore({self._where!a})"

    @contextmanager
    def _reachable(self) -> Iterator[None]:
        """Name what goes wrong, and ask no server that failed a moment ago."""
        self._outage.check()
        try:
            yield
        except self._module.OutOfMemoryError as error:
            raise StoreFull(f"{self!r}: the server's maxmemory is used up: {error}") from error
        except (self._module.ConnectionError, self._module.TimeoutError, OSError) as error:
            self._unavailable(error)
        except self._module.RedisError as error:
            if isinstance(error, self._denied):
                self._unavailable(error)
            raise StoreError(f"{self!r}: {error}") from error

    def _unavailable(self, error: Exception) -> NoReturn:
        denied = isinstance(error, self._denied)
        what = "refuses user or password" if denied else "does not answer"
        self._outage.begin(f"{self!r} {what} ({type(error).__name__}: {error})", error)

    def _read(self, name: str, *, use: bool = True) -> tuple[bytes, bytes] | None:
        with self._reachable():
            record = self._client.get(self._prefix + name)
        return None if record is None else (record, record)

    def _read_many(self, names: Sequence[str]) -> list[Found]:
        with self._reachable():
            records = self._client.mget([self._prefix + name for name in names]) if names else []
        return [None if record is None else (record, record) for record in records]

    def _write(self, name: str, head: bytes, blob: memoryview, created: float) -> None:
        if len(head) + blob.nbytes > _LARGEST:
            raise StoreFull(
                f"{self!r}: {blob.nbytes} bytes, a server takes {_LARGEST} as one value"
            )
        milliseconds = None if self._ttl is None else max(1, int(self._ttl * 1000))
        with self._reachable():
            self._client.set(self._prefix + name, b"".join((head, blob)), px=milliseconds)

    def _discard(self, name: str, token: bytes) -> None:
        # Another process may put a good one in between; then that is a miss, too.
        with self._reachable():
            self._client.delete(self._prefix + name)

    def _contains(self, name: str) -> bool:
        with self._reachable():
            return bool(self._client.exists(self._prefix + name))

    def _contains_many(self, names: Sequence[str]) -> list[bool]:
        with self._reachable(), self._client.pipeline(transaction=False) as pipe:
            for name in names:
                pipe.exists(self._prefix + name)
            return [bool(found) for found in pipe.execute()]

    def _delete(self, name: str) -> bool:
        with self._reachable():
            return bool(self._client.delete(self._prefix + name))

    def _names(self) -> Iterator[str]:
        # Others may have keys below the prefix: another store's with a longer prefix, lists, sets.
        with self._reachable():
            scan = self._client.scan_iter(f"{self._prefix}*", _BATCH, _type="string")
            found = {bytes(key)[len(self._prefix) :].decode(errors="replace") for key in scan}
        return iter(sorted(filter(is_key, found)))

    def _held(self) -> tuple[int, int]:
        names = list(self._names())
        held = 0
        for start in range(0, len(names), _BATCH):
            with self._reachable(), self._client.pipeline(transaction=False) as pipe:
                for name in names[start : start + _BATCH]:
                    pipe.strlen(self._prefix + name)
                held += sum(pipe.execute())
        return len(names), held

    def _collect(self) -> GCReport:
        with self._reachable():  # the server removes by itself; that it is there is asked for
            self._client.ping()
        return GCReport()

    def _close(self) -> None:
        self._client.close()


def _check_url(url: str) -> None:
    """Refuse a URL that a password has cut, and options that would win over the arguments."""
    try:
        parts = urlsplit(url)
        names = parse_qs(parts.query, keep_blank_values=True)
    except ValueError:
        raise StoreError(_WRONG_URL) from None
    path = "" if parts.scheme == "unix" else parts.path
    if parts.fragment or "@" in path + parts.query:
        raise StoreError(_WRONG_URL)
    if any(name.startswith(("ssl_", "socket_")) for name in names):
        raise StoreError(
            "the redis URL has an option ssl_... or socket_...; give ca_certs=, certfile=, "
            "keyfile= and timeout= instead, certificates are always checked"
        )
