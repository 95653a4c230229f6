"""The options of a `MooncakeStore`, of its arguments and its URL."""

from __future__ import annotations

import socket
from dataclasses import dataclass
from typing import Any, Self
from urllib.parse import parse_qsl, urlsplit

from kvpact.errors import StoreError
from kvpact.files import bytes_of

_KNOWN = ("segment_size", "buffer_size", "admin", "hostname", "prefix", "timeout")
_SMALLEST_SEGMENT = 16 << 20  # in which Mooncake rounds them


@dataclass(frozen=True)
class Address:
    """A host and a port; its text is ``host:port``, brackets around IPv6."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @classmethod
    def of(cls, text: str) -> Self:
        """Read ``host:port``. Raises `StoreError`."""
        try:
            parts = urlsplit(f"//{text}")
            if parts.hostname and parts.port and parts.netloc == text and "@" not in text:
                return cls(parts.hostname, parts.port)
        except ValueError:
            pass
        raise StoreError(f"{text!r} should be host:port")


@dataclass(frozen=True)
class Options:
    """The checked options of a store."""

    master: Address
    admin: Address
    segment_size: int
    buffer_size: int
    hostname: str | None
    prefix: str
    timeout: float


def options_of(url: str, **arguments: Any) -> Options:
    """Read a URL and arguments; None is for what is not given. Raises `StoreError`."""
    parts = urlsplit(url)
    if parts.scheme != "mooncake" or parts.path not in ("", "/") or parts.fragment:
        raise StoreError(f"{url!r} should be mooncake://host:port, and a ? with options after it")
    master = Address.of(parts.netloc)
    given = {name: value for name, value in arguments.items() if value is not None}
    for name, value in parse_qsl(parts.query, keep_blank_values=True):
        if name not in _KNOWN:
            raise StoreError(f"{url!r} has an option {name}; known are {', '.join(_KNOWN)}")
        if name in given:
            raise StoreError(f"{name} is given twice")
        given[name] = value
    segment = _size("segment_size", given.get("segment_size", 0))
    if 0 < segment < _SMALLEST_SEGMENT:
        raise StoreError(f"segment_size={segment} should be 0, or {_SMALLEST_SEGMENT} and more")
    buffer = _size("buffer_size", given.get("buffer_size", 256 << 20))
    if buffer < 1 << 20:
        raise StoreError(f"buffer_size={buffer} should be {1 << 20} and more")
    admin = str(given.get("admin", 9003))
    if ":" not in admin and not (admin.isdecimal() and 0 < int(admin) < 65536):
        raise StoreError(f"admin={admin!r} should be host:port, or a port")
    return Options(
        master=master,
        admin=Address.of(admin if ":" in admin else str(Address(master.host, int(admin)))),
        segment_size=segment,
        buffer_size=buffer,
        hostname=given.get("hostname"),
        prefix=given.get("prefix", "kvpact:"),
        timeout=_seconds(given.get("timeout", 5.0)),
    )


def local_address(master: Address, timeout: float) -> str:
    """Return the address from which this machine reaches the master. Raises `OSError`."""
    with socket.create_connection((master.host, master.port), timeout) as probe:
        return str(probe.getsockname()[0])


def _size(name: str, value: int | str) -> int:
    if type(value) is int and value >= 0:
        return value
    if isinstance(value, str) and (value == "0" or bytes_of(value)):
        return bytes_of(value)
    raise StoreError(f"{name}={value!r} should be bytes, or a text such as 512MiB or 4GB")


def _seconds(value: float | str) -> float:
    try:
        seconds = float(value)
    except (TypeError, ValueError):
        seconds = 0.0
    if not 0 < seconds < 3600:
        raise StoreError(f"timeout={value!r} should be seconds above 0")
    return seconds
