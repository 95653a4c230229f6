"""The process of a Mooncake client, run by its path; `mooncake_client.py` starts and asks it.

It imports mooncake, numpy and the standard library alone. A process of its own, because Mooncake's
setup holds the interpreter's lock as long as a master keeps silent, its close waits for a master
that is gone, a call after that ends the process, and its ports, open to whoever reaches them, lead
into the memory of the process. None of this is to befall a process that computes.

Settings come as a line of JSON, then one request a line, ``[id, operation, argument, …]``; replies
are ``[id, result]``, in the order in which they are ready. Blobs lie in shared memory. A number
below 0 is Mooncake's error code; ``{"error": text}`` is everything unforeseen.
"""

from __future__ import annotations

import http.client
import json
import mmap
import os
import re
import signal
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

NOT_READY = -703
MISSING = -704
THREADS = 8
_BATCH = 500


class Client:
    """A client that is set up, and the shared memory that it moves blobs to and from."""

    def __init__(self, settings: dict[str, Any]) -> None:
        from mooncake.store import MooncakeDistributedStore

        self._store = MooncakeDistributedStore()
        code = self._store.setup(settings["setup"])
        if code:
            raise RuntimeError(f"the master refuses or does not answer (Mooncake's error {code})")
        self._gives = settings["setup"]["global_segment_size"] > 0
        self._patience = settings["timeout"] / 2  # less than the one who asks has
        self._prefix = settings["prefix"]
        self._entry = re.compile(f"{re.escape(self._prefix)}({settings['key']})")
        size = settings["memory_size"]
        self._memory = mmap.mmap(settings["memory"], size)
        self._base = int(np.frombuffer(self._memory, np.uint8).ctypes.data)
        code = self._store.register_buffer(self._base, size)
        if code:
            raise RuntimeError(f"the shared memory is refused (Mooncake's error {code})")

    def put(self, name: str, at: int, size: int) -> int:
        """Store bytes in place of what was there, which Mooncake's own put would keep."""
        end = time.monotonic() + self._patience
        while (code := self.remove(name)) == NOT_READY and time.monotonic() < end:
            time.sleep(0.005)  # until the other who stores it has done so
        if code not in (0, MISSING):
            return code
        return int(self._store.put_from(self._prefix + name, self._base + at, size))

    def get(self, name: str, at: int, room: int) -> int:
        """Read an object; return its size or an error."""
        return int(self._store.get_into(self._prefix + name, self._base + at, room))

    def head(self, name: str, at: int, room: int) -> int | list[int]:
        """Read an object's first bytes; return how many, and its size."""
        key = self._prefix + name
        size = int(self._store.get_size(key))
        if size < 0:
            return size
        length = min(size, room)
        buffer = [self._base + at]
        found = self._store.get_into_ranges(buffer, [[key]], [[[0]]], [[[0]]], [[[length]]])
        code = int(found[0][0][0])
        return code if code < 0 else [code, size]

    def exists(self, name: str) -> int:
        """Return 1, 0, or an error."""
        return int(self._store.is_exist(self._prefix + name))

    def remove(self, name: str) -> int:
        """Remove an object at once, although it was read a moment ago; return 0 or an error."""
        return int(self._store.remove(self._prefix + name, True))

    def names(self, host: str, port: int, timeout: float) -> list[str] | str:
        """Return the keys of entries, or what went wrong with the master's HTTP server."""
        connection = http.client.HTTPConnection(host, port, timeout=timeout)
        try:
            connection.request("GET", "/get_all_keys")
            response = connection.getresponse()
            text = response.read().decode(errors="replace")
        except (OSError, http.client.HTTPException) as error:
            return f"{type(error).__name__}: {error}"
        finally:
            connection.close()
        if response.status != 200:
            return f"HTTP status {response.status}"
        found = (self._entry.fullmatch(line) for line in text.split("\n"))
        return [match[1] for match in found if match]

    def held(self, host: str, port: int, timeout: float) -> list[int] | str:
        """Return the number of entries and their bytes, or what went wrong."""
        names = self.names(host, port, timeout)
        if isinstance(names, str):
            return names
        total = 0
        for start in range(0, len(names), _BATCH):
            keys = [self._prefix + name for name in names[start : start + _BATCH]]
            for copies in self._store.batch_get_replica_desc(keys).values():
                memory = [copy for copy in copies if copy.is_memory_replica()]
                for copy in memory[:1]:
                    total += int(copy.get_memory_descriptor().buffer_descriptor.size)
        return [len(names), total]

    def close(self) -> None:
        """Give the cluster notice of a segment that goes; this takes a second or two."""
        if self._gives:
            self._store.close()


def main() -> None:
    """Serve until the other end is closed or gone."""
    replies = os.fdopen(os.dup(1), "w", encoding="ascii")
    os.dup2(2, 1)  # what Mooncake prints is no reply
    lock = threading.Lock()

    def reply(number: int, result: object) -> None:
        with lock:
            replies.write(json.dumps([number, result]) + "\n")
            replies.flush()

    settings = json.loads(sys.stdin.readline())
    # The kernel ends a process that hangs in native code, whoever holds which lock.
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(settings["start_limit"])
    try:
        client = Client(settings)
    except ImportError as error:
        reply(0, f"import: {error}")
        os._exit(1)
    except Exception as error:
        reply(0, f"setup: {error}")
        os._exit(1)
    signal.alarm(0)
    operations = {
        name: getattr(client, name)
        for name in ("put", "get", "head", "exists", "remove", "names", "held")
    }

    def serve(number: int, name: str, *arguments: Any) -> None:
        try:
            result = operations[name](*arguments)
        except Exception as error:
            result = {"error": f"{type(error).__name__}: {error}"}
        reply(number, result)

    reply(0, "ready")
    threads = ThreadPoolExecutor(THREADS)
    for line in sys.stdin:
        threads.submit(serve, *json.loads(line))
    signal.alarm(settings["close_limit"])
    client.close()
    os._exit(0)


if __name__ == "__main__":
    main()
