"""`Outage`: a server that failed is not asked again for a while."""

from __future__ import annotations

import threading
import time
from typing import NoReturn

from kvpact.errors import StoreUnavailable


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
        """Ask nobody for a while. Always raises `StoreUnavailable`, with this reason."""
        with self._lock:
            self._until, self._reason = time.monotonic() + self._retry_after, reason
        raise StoreUnavailable(reason) from cause
