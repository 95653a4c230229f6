"""Threads that talk to a store, so that nobody who serves tokens ever waits for it."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

IDLE = 0.01
"""Seconds that an engine with nothing to compute waits for a job before it looks around."""


class Job(Future[Any]):
    """The future of something that a `Lane` does: `work` is called with it.

    `stopped`: nobody waits for it any more; `progress`: whatever `work` notes there.
    """

    def __init__(self, work: Callable[[Job], Any]) -> None:
        super().__init__()
        self.stopped, self.progress, self._work = False, 0, work

    def run(self) -> None:
        """Do it; nothing is raised."""
        try:
            self.set_result(None if self.stopped else self._work(self))
        except BaseException as error:  # a third party's store may raise anything
            self.set_exception(error)


class Lane:
    """Does jobs in the order in which they come, in threads that end with the process."""

    def __init__(self, name: str, threads: int = 1) -> None:
        self._changed = threading.Condition()
        self._waiting: deque[Job] = deque()
        self._began: list[float | None] = [None] * threads
        self._closing = False
        for index in range(threads):
            threading.Thread(target=self._serve, args=(index,), name=name, daemon=True).start()

    def submit(self, work: Callable[[Job], Any]) -> Job:
        """Queue a job and return it."""
        job = Job(work)
        with self._changed:
            self._waiting.append(job)
            self._changed.notify_all()
        return job

    def stuck(self, seconds: float) -> bool:
        """Tell whether all threads have been at one job for longer than this."""
        now = time.monotonic()
        with self._changed:
            return all(began is not None and now - began > seconds for began in self._began)

    def wait(self) -> None:
        """Wait until a job ends, for `IDLE` seconds at most."""
        with self._changed:
            self._changed.wait(IDLE)

    def close(self, seconds: float) -> bool:
        """Let the threads end when all is done; wait so long at most and tell whether it is."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
            return self._changed.wait_for(
                lambda: not self._waiting and not any(x is not None for x in self._began), seconds
            )

    def _serve(self, index: int) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._closing)
                if not self._waiting:
                    return
                job = self._waiting.popleft()
                self._began[index] = time.monotonic()
            job.run()
            with self._changed:
                self._began[index] = None
                self._changed.notify_all()
