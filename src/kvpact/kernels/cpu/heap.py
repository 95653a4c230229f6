"""What malloc is told while a cache stores a prompt, so that a process takes what its cache holds.

After its first large free glibc keeps blocks up to 32 MiB in its heap, a model's activations among
them. What a cache keeps of a layer comes to lie in a hole that an activation left; the next one
then finds none that is large enough, and the heap grows by activations with each layer. While a
`Hold` lasts, blocks from 128 KiB on come from the system and go back to it at once.

``KVPACT_MALLOC``, or settings of glibc's own in the environment, leave malloc as it is; other
allocators than glibc's are never told anything.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple, Self
from weakref import ref

from torch import Tensor

from kvpact.errors import BackendUnavailable
from kvpact.kernels.cpu.library import library

FEW = 8
"""Tokens of a step at most; a call of more is one of a prompt."""
LARGE = 1 << 19
"""Bytes of K and V of a layer in one call, from which on what is free by its end is given back."""
_MAPS = Path("/proc/self/maps")
_VARIABLES = ("KVPACT_MALLOC", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_")


class Malloc(NamedTuple):
    """Whose malloc a process uses, and why it is told nothing; "" where it is told."""

    name: str
    reason: str


@lru_cache(maxsize=1)
def malloc_here() -> Malloc:
    """Return what is known of this process's malloc."""
    name = _owner()
    if not name.startswith("libc.so") or "CS_GNU_LIBC_VERSION" not in os.confstr_names:
        return Malloc(name, "it is not glibc's")
    name = os.confstr("CS_GNU_LIBC_VERSION") or name
    given = [x for x in _VARIABLES if x in os.environ]
    if "glibc.malloc." in os.environ.get("GLIBC_TUNABLES", ""):
        given.append("GLIBC_TUNABLES")
    if given:
        return Malloc(name, f"{given[0]} is set")
    try:
        library()
    except BackendUnavailable as error:
        return Malloc(name, str(error))
    return Malloc(name, "")


def _owner() -> str:
    """Return the name of the library whose malloc is called; "unknown" where none is found."""
    if not _MAPS.exists():
        return "unknown"
    address = ctypes.cast(ctypes.CDLL(None).malloc, ctypes.c_void_p).value or 0
    for line in _MAPS.read_text("utf-8", "replace").splitlines():
        region, *_, path = line.split(maxsplit=5)
        first, last = (int(x, 16) for x in region.split("-"))
        if first <= address < last:
            return Path(path).name
    return "unknown"


class _Native:
    """The functions of the library that tell malloc."""

    def __init__(self) -> None:
        loaded = library()
        # With the interpreter's lock held: no other thread, and no fork, comes in between.
        self.hold: Any = ctypes.PyDLL(str(loaded.path)).kvp_heap_hold
        self.hold.restype, self.hold.argtypes = loaded.heap_hold.restype, loaded.heap_hold.argtypes
        self.trim = loaded.heap_trim


@lru_cache(maxsize=1)
def _native() -> _Native | None:
    return None if malloc_here().reason else _Native()


class Hold:
    """A cache's prompts: each from its first layer to the end of the model's forward pass.

    That is when the tensor that `until` names is gone; without one, the last layer's call. At the
    latest it is the next step, or the end of the cache.

    `active`: whether there is something to end.
    """

    __slots__ = ("__weakref__", "_end", "_large", "_on", "active")

    def __init__(self) -> None:
        self.active = self._on = self._large = False
        self._end: ref[Tensor] | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return type(self)()

    def held_parts(self) -> tuple[()]:
        """Hold no memory (see `kvpact.testing.held_tensors`)."""
        return ()

    def begin(self, tokens: int, size: int = 0) -> None:
        """Begin with a call of so many tokens, `size` bytes of K and V; few of them end it."""
        if tokens <= FEW:
            if self.active:
                self.end()
        elif (native := _native()) is not None:
            self._large = self._large or size >= LARGE
            if not self._on:
                self.active = self._on = native.hold(1) > 0

    def until(self, tensor: Tensor | None) -> None:
        """Let it end with a tensor that lives as long as the model's forward pass."""
        if not self._on or tensor is None or (self._end is not None and self._end() is tensor):
            return
        me = ref(self)

        def gone(_: object) -> None:
            hold = me()
            if hold is not None:
                hold.end()

        self._end = ref(tensor, gone)

    def stored(self, last: bool) -> None:
        """Say that a layer's tokens are stored; `last`: no other layer follows."""
        if last and self._on and (self._end is None or self._end() is None):
            self._release()

    def end(self) -> None:
        """Let malloc do as before; behind a large call, give back what is free by now."""
        self._release()
        large, self._large, self._end, self.active = self._large, False, None, False
        if large and (native := _native()) is not None:
            native.trim()

    def _release(self) -> None:
        if self._on and (native := _native()) is not None:
            self._on = False
            native.hold(-1)

    def __del__(self) -> None:
        if self._on:
            self._release()


@contextmanager
def giving_back() -> Iterator[None]:
    """Give back what a call took in between that makes copies of a cache's size."""
    hold = Hold()
    hold.begin(FEW + 1, LARGE)
    try:
        yield
    finally:
        hold.end()
