"""`MooncakeClient`: calls of a process that has a Mooncake client, each with a deadline."""

from __future__ import annotations

import json
import mmap
import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

LANES = 4
"""Calls that may move a blob at once."""

_START_LIMIT = 30  # seconds for a process to start on a busy machine, after the master's timeout
_CLOSE_LIMIT = 5  # seconds to leave the cluster; it takes two, and more where the master is away


class NoAnswer(Exception):
    """The process, the master or a peer did not answer in time, or the process is gone."""


class CannotStart(Exception):
    """Mooncake can't be imported."""


_ENDED = "its process has ended"


@dataclass
class _Lane:
    """A part of the shared memory; `kept` while a call that nobody waits for may still use it."""

    at: int
    deadline: float
    kept: bool = False

    @property
    def left(self) -> float:
        return self.deadline - time.monotonic()


@dataclass
class _StoreCall:
    lane: _Lane | None = None
    done: threading.Event = field(default_factory=threading.Event)
    reply: Any = None


class MooncakeClient:
    """A process with a client of a Mooncake cluster, and memory shared with it, for any threads.

    A call that is not answered in time raises; its part of the memory waits for the late answer.
    """

    def __init__(
        self, settings: dict[str, Any], memory_size: int, timeout: float, log: str | None = None
    ) -> None:
        self.lane_size = memory_size // LANES
        self._calls: dict[int, _StoreCall] = {0: _StoreCall()}
        self._next, self._ended, self._lock = 0, False, threading.Lock()
        self._lanes: queue.LifoQueue[int] = queue.LifoQueue()
        for lane in range(LANES):
            self._lanes.put(lane * self.lane_size)
        whole = max(1, round(timeout))
        descriptor = os.memfd_create("kvpact-mooncake")
        try:
            os.ftruncate(descriptor, memory_size)
            self._memory = mmap.mmap(descriptor, memory_size)
            self._process = _start(descriptor, timeout, log)
        finally:
            os.close(descriptor)
        assert self._process.stdin is not None
        self._requests = self._process.stdin.fileno()
        # What a stopped process does not read would block the writer.
        os.set_blocking(self._requests, False)
        threading.Thread(target=self._listen, name="kvpact-mooncake", daemon=True).start()
        limits = {"start_limit": whole + _START_LIMIT, "close_limit": _CLOSE_LIMIT}
        memory = {"memory": descriptor, "memory_size": memory_size}
        self._begin(timeout, settings | limits | memory | {"timeout": timeout})

    def _begin(self, timeout: float, settings: dict[str, Any]) -> None:
        try:
            self._send(settings)
            hello = str(self._answer(self._calls[0], timeout + _START_LIMIT))
            if hello.startswith("import: "):
                raise CannotStart(hello.removeprefix("import: "))
            if hello != "ready":
                raise NoAnswer(hello.removeprefix("setup: "))
        except BaseException:
            self.kill()
            raise

    @property
    def alive(self) -> bool:
        """True while the process runs."""
        return self._process.poll() is None

    def ask(self, timeout: float, operation: str, *arguments: Any) -> Any:
        """Return the result of an operation that moves no blob. Raises `NoAnswer`."""
        return self._ask(timeout, None, operation, *arguments)

    def put(self, timeout: float, name: str, head: bytes, blob: memoryview) -> int:
        """Store a record; return 0 or an error of Mooncake's. Raises `NoAnswer`."""
        size = len(head) + blob.nbytes
        with self._lane(timeout) as lane:
            self._memory[lane.at : lane.at + len(head)] = head
            self._memory[lane.at + len(head) : lane.at + size] = blob
            return int(self._ask(lane.left, lane, "put", name, lane.at, size))

    def get(self, timeout: float, name: str) -> bytes | int:
        """Return a record, or an error of Mooncake's. Raises `NoAnswer`."""
        with self._lane(timeout) as lane:
            size = self._ask(lane.left, lane, "get", name, lane.at, self.lane_size)
            return self._memory[lane.at : lane.at + size] if size >= 0 else int(size)

    def head(self, timeout: float, name: str, length: int) -> tuple[bytes, int] | int:
        """Return a record's first bytes and its size, or an error of Mooncake's."""
        with self._lane(timeout) as lane:
            found = self._ask(lane.left, lane, "head", name, lane.at, length)
            if isinstance(found, int):
                return found
            return self._memory[lane.at : lane.at + found[0]], found[1]

    def close(self) -> None:
        """Leave the cluster; after a time limit without leave."""
        with suppress(OSError):
            self._process.stdin.close()  # type: ignore[union-attr]
        try:
            self._process.wait(_CLOSE_LIMIT)
        except subprocess.TimeoutExpired:
            self.kill()

    def kill(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.wait()
        with suppress(OSError):
            self._process.stdin.close()  # type: ignore[union-attr]

    @contextmanager
    def _lane(self, timeout: float) -> Iterator[_Lane]:
        deadline = time.monotonic() + timeout
        try:
            lane = _Lane(self._lanes.get(timeout=timeout), deadline)
        except queue.Empty:
            raise NoAnswer(f"{LANES} calls wait already") from None
        try:
            yield lane
        finally:
            with self._lock:
                if not lane.kept:
                    self._lanes.put(lane.at)

    def _ask(self, timeout: float, lane: _Lane | None, operation: str, *arguments: Any) -> Any:
        with self._lock:
            if self._ended:
                raise NoAnswer(_ENDED)
            self._next += 1
            number, call = self._next, _StoreCall(lane)
            self._calls[number] = call
        try:
            self._send([number, operation, *arguments])
        except NoAnswer:
            with self._lock:
                self._calls.pop(number, None)
            raise
        return self._answer(call, timeout)

    def _send(self, request: Any) -> None:
        # Less than a pipe takes in one piece: all of it is written or nothing.
        try:
            os.write(self._requests, json.dumps(request).encode() + b"\n")
        except BlockingIOError:
            raise NoAnswer("its process reads nothing") from None
        except OSError as error:
            raise NoAnswer(_ENDED) from error

    def _answer(self, call: _StoreCall, timeout: float) -> Any:
        if not call.done.wait(max(timeout, 0)):
            with self._lock:
                if not call.done.is_set():
                    if call.lane is not None:
                        call.lane.kept = True
                    raise NoAnswer(f"nothing for {timeout:.3g} s")
        if isinstance(call.reply, dict):
            raise NoAnswer(call.reply["error"])
        return call.reply

    def _listen(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as replies, suppress(ValueError):  # a line that was cut
            for line in replies:
                number, reply = json.loads(line)
                self._done(number, reply)
        with self._lock:
            self._ended = True
            left = list(self._calls)
        for number in left:
            self._done(number, {"error": _ENDED})

    def _done(self, number: int, reply: Any) -> None:
        with self._lock:
            call = self._calls.pop(number)
            call.reply = reply
            call.done.set()
            if call.lane is not None and call.lane.kept:
                call.lane.kept = False
                self._lanes.put(call.lane.at)


def _start(memory: int, timeout: float, log: str | None) -> subprocess.Popen[bytes]:
    """Start the process; Mooncake takes its time limits from the environment."""
    milliseconds, seconds = str(max(1, int(timeout * 1000))), str(max(1, round(timeout)))
    limits = {
        "MC_STORE_CLIENT_SETUP_RETRIES": "1",
        "MC_RPC_TIMEOUT_MS": milliseconds,
        "MC_RPC_CONNECT_TIMEOUT_MS": milliseconds,
        "MC_TCP_PROGRESS_TIMEOUT_SEC": seconds,
        "MC_TCP_STATUS_TIMEOUT_SEC": seconds,
    }
    with open(log or os.devnull, "ab") as errors:
        return subprocess.Popen(
            # -P: the modules in the script's folder have names of packages.
            [sys.executable, "-P", str(Path(__file__).with_name("mooncake_process.py"))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            pass_fds=(memory,),
            env=limits | os.environ,
            start_new_session=True,  # an interrupt is for those who compute
        )
