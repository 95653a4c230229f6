"""``kv_connector_extra_config``: where chunks lie, and how long anybody waits for them."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from kvpact.errors import FormatError, StoreError
from kvpact.files import read_regular
from kvpact.stores import Store, open_store


@dataclass(frozen=True, kw_only=True)
class ConnectorOptions:
    """The connector's options, ``kv_connector_extra_config``; docs/vllm.md describes them."""

    store: str
    timeout: float = 5.0
    chunk: int | None = None
    tenant: str = ""
    model: str | None = None
    storage: str | None = None
    secret_file: str | None = None
    queue_bytes: int = 256 << 20

    def __post_init__(self) -> None:
        for name, kinds, good in (
            ("store", str, bool(self.store)),
            ("timeout", int | float, _above_zero(self.timeout)),
            ("chunk", int | None, self.chunk is None or _above_zero(self.chunk)),
            ("tenant", str, True),
            ("model", str | None, self.model != ""),
            ("storage", str | None, self.storage != ""),
            ("secret_file", str | None, self.secret_file != ""),
            ("queue_bytes", int, _above_zero(self.queue_bytes)),
        ):
            value = getattr(self, name)
            if not good or not isinstance(value, kinds) or isinstance(value, bool):
                raise StoreError(f"kv_connector_extra_config: {name} can't be {value!r}")


def options_of(extra: Mapping[str, Any]) -> ConnectorOptions:
    """Read ``kv_connector_extra_config``; see `ConnectorOptions` for what it raises."""
    known = [field.name for field in fields(ConnectorOptions)]
    unknown = [name for name in extra if name not in known]
    if unknown or "store" not in extra:
        what = f"there is no {unknown[0]!r}" if unknown else "it needs a store"
        raise StoreError(f"kv_connector_extra_config: {what}; the options are {', '.join(known)}")
    return ConnectorOptions(**extra)


def _above_zero(value: Any) -> bool:
    return isinstance(value, int | float) and value > 0


_shared: dict[tuple[str, str | None], tuple[Store, int]] = {}
_lock = threading.Lock()


def share_store(options: ConnectorOptions) -> Store:
    """Open the store, or return the one that this process (scheduler, worker) has open."""
    which = options.store, options.secret_file
    with _lock:
        if which in _shared:
            store, users = _shared[which]
        else:
            path, secret = options.secret_file, None
            try:
                secret = None if path is None else read_regular(path)
            except (OSError, FormatError) as error:
                raise StoreError(
                    f"kv_connector_extra_config: no secret_file {path!r} ({error})"
                ) from error
            store, users = open_store(options.store, secret=secret), 0
        _shared[which] = store, users + 1
        return store


def release_store(options: ConnectorOptions) -> None:
    """Close a store that nobody else uses."""
    which = options.store, options.secret_file
    with _lock:
        store, users = _shared.pop(which)
        if users > 1:
            _shared[which] = store, users - 1
            return
    store.close()
