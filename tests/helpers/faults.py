"""Exceptions from where nobody expects them: an interrupt at a line, an allocation that fails."""

import linecache
import sys
import threading
from pathlib import Path

import torch
from torch.utils._python_dispatch import TorchDispatchMode

import kvpact

_ROOM = str(Path(kvpact.__file__).parent)


class OutOfMemory(RuntimeError):
    """What a failing allocation raises here."""


class Interrupt:
    """Raise `KeyboardInterrupt` before the n-th line of kvpact's code that runs in a `with` block.

    Not at `with` or `try`, where a signal is never delivered: Python reports the former again when
    the block is left, and the latter does nothing.
    """

    def __init__(self, n: int) -> None:
        self.left = n

    @property
    def fired(self) -> bool:
        """Whether it was raised."""
        return self.left <= 0

    def __enter__(self) -> "Interrupt":
        self._old = sys.gettrace()
        sys.settrace(self._call)
        return self

    def __exit__(self, *error: object) -> None:
        sys.settrace(self._old)

    def _call(self, frame, event, arg):
        return self._line if frame.f_code.co_filename.startswith(_ROOM) else None

    def _line(self, frame, event, arg):
        if event != "line" or self.fired:
            return self._line
        line = linecache.getline(frame.f_code.co_filename, frame.f_lineno)
        if line.lstrip().startswith(("with ", "try:")):
            return self._line
        self.left -= 1
        if self.fired:
            raise KeyboardInterrupt
        return self._line


class FailingAllocation(TorchDispatchMode):
    """Raise `OutOfMemory` instead of the n-th operation of torch in a `with` block."""

    def __init__(self, n: int) -> None:
        super().__init__()
        self.left = n

    @property
    def fired(self) -> bool:
        """Whether it was raised."""
        return self.left <= 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.left -= 1
        if self.left == 0:
            raise OutOfMemory(f"no memory for {func}")
        return func(*args, **(kwargs or {}))


FAULTS = {"interrupt": (Interrupt, KeyboardInterrupt), "memory": (FailingAllocation, OutOfMemory)}


def disturbed(call, fault: str, n: int) -> bool:
    """Run a call under the n-th fault; return whether the fault ended it."""
    make, error = FAULTS[fault]
    try:
        with make(n):
            call()
    except error:
        return True
    return False


def length_of(call, fault: str) -> int:
    """Return how many lines, or operations, a call has: that many faults it can meet."""
    make, _ = FAULTS[fault]
    with make(1 << 40) as counting:
        call()
    return (1 << 40) - counting.left


def is_free(lock) -> bool:
    """Whether another thread can take a lock."""
    found = []

    def take() -> None:
        found.append(lock.acquire(blocking=False))
        if found[0]:
            lock.release()

    thread = threading.Thread(target=take)
    thread.start()
    thread.join()
    return found[0]


def same_state(a, b) -> bool:
    """Whether two layers' states (`kvpact.cache.layer.states.layer_state`) are the same bytes."""
    if a.padding != b.padding or (a.streams is None) != (b.streams is None):
        return False
    return a.streams is None or all(map(_same_stream, a.streams, b.streams))


def _same_stream(a, b) -> bool:
    return (
        (a.packed, a.start, a.length) == (b.packed, b.start, b.length)
        and _same(a.tail, b.tail)
        and _same(a.sinks, b.sinks)
        and all(
            x.keys() == y.keys() and all(_same(x[name], y[name]) for name in x)
            for x, y in ((a.slots, b.slots), (a.learnt, b.learnt))
        )
    )


def _same(a, b) -> bool:
    if a is None or b is None:
        return a is b
    return a.shape == b.shape and a.dtype == b.dtype and _bytes(a).equal(_bytes(b))


def _bytes(x):
    return x.contiguous().flatten().view(torch.uint8)
