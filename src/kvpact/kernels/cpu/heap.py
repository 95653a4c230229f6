"""Settings of malloc while a cache stores a prompt, so that a process takes what its cache holds.

After its first large free glibc keeps blocks up to 32 MiB in its heap, a model's activations among
them. What a cache keeps of a layer comes to lie in a hole that an activation left; the next one
then finds none that is large enough, and the heap grows by activations with each layer. While a
`Hold` lasts, blocks from 128 KiB on come from the system and go back to it at once.

``KVPACT_MALLOC``, or settings of glibc's own in the environment, leave malloc as it is; other
allocators than glibc's are left alone.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple, Self
from weakref import ref

import torch
from torch import Tensor

from kvpact.errors import BackendUnavailable
from kvpact.kernels.cpu.library import NativeLibrary, library

FEW = 8
"""Tokens of a step at most; a call of more is one of a prompt."""
LARGE = 1 << 19
"""Bytes of K and V of a layer in one call, from which on what is free by its end is given back."""
_MAPS = Path("/proc/self/maps")
_VARIABLES = ("KVPACT_MALLOC", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_")


class Malloc(NamedTuple):
    """The malloc of a process, and why it is left as it is; "" where it is set."""

    name: str
    reason: str


@lru_cache(maxsize=1)
def malloc_here() -> Malloc:
    """Return what is known of this process's malloc."""
    name, reason = "unknown", ""
    if _MAPS.exists():
        address = ctypes.cast(ctypes.CDLL(None).malloc, ctypes.c_void_p).value or 0
        for line in _MAPS.read_text("utf-8", "replace").splitlines():
            first, last = (int(x, 16) for x in line.split()[0].split("-"))
            if first <= address < last:
                name = Path(line.split()[-1]).name
    if not name.startswith("libc.so") or "CS_GNU_LIBC_VERSION" not in os.confstr_names:
        return Malloc(name, "it is not glibc's")
    given = [x for x in _VARIABLES if x in os.environ]
    given += ["GLIBC_TUNABLES"] * ("glibc.malloc." in os.environ.get("GLIBC_TUNABLES", ""))
    try:
        library()
    except BackendUnavailable as error:
        reason = str(error)
    return Malloc(
        os.confstr("CS_GNU_LIBC_VERSION") or name, f"{given[0]} is set" if given else reason
    )


def _native() -> NativeLibrary | None:
    return None if malloc_here().reason else library()


class Hold:
    """A cache's prompts: each from its first layer to the end of the model's forward pass.

    That is when the tensor that `until` names is gone, else the last layer's call, at the latest
    the next step or the cache's end. `active`: whether there is something to end.

    Once all layers have memory for what they will store it may end early (`early`), but not where
    others than these hold copies of a `window` of a much longer prompt.
    """

    __slots__ = ("__weakref__", "_end", "_idle", "_large", "_on", "_whole", "active", "window")

    def __init__(self, window: int = 0) -> None:
        self.window = window
        self.active = self._large = self._whole = False
        self._end: ref[Tensor] | None = None
        # What is in one of these lists is taken by one thread alone, without a lock, which a
        # destructor could not wait for.
        self._idle, self._on = [True], list[bool]()

    def __deepcopy__(self, memo: object) -> Self:
        return type(self)(self.window)

    def held_parts(self) -> tuple[()]:
        """Hold no memory (see `kvpact.testing.held_tensors`)."""
        return ()

    def begin(
        self,
        tokens: int,
        size: int = 0,
        device: torch.device | None = None,
        hold: bool = True,
    ) -> None:
        """Begin with a call of so many tokens, `size` bytes of K and V; few of them end it.

        A `device` not known yet is the GPU in use. Without `hold` only what is free is given back.
        """
        gpu: Any = torch.cuda  # has no types
        away = gpu.is_initialized() if device is None else device.type != "cpu"
        if tokens <= FEW:
            if self.active:
                self.end()
        elif not away and (native := _native()) is not None:
            self._large, self.active = self._large or size >= LARGE, True
            self._whole = 0 < 2 * self.window < tokens
            while (hold or self._whole) and self._idle:
                with suppress(IndexError):
                    self._idle.pop()
                    native.heap_hold(1)
                    self._on.append(True)

    def until(self, tensor: Tensor | None) -> None:
        """Let it end with a tensor that lives as long as the model's forward pass."""
        if not self.active or tensor is None or (self._end is not None and self._end() is tensor):
            return
        me = ref(self)

        def gone(_: object) -> None:
            hold = me()
            if hold is not None:
                hold.end()

        self._end = ref(tensor, gone)

    def early(self) -> None:
        """Let malloc do as before, if nobody else keeps anything of this prompt."""
        if not self._whole:
            self.release()

    def stored(self, last: bool) -> None:
        """Note that a layer's tokens are stored; `last`: no other layer follows."""
        if last and self._on and (self._end is None or self._end() is None):
            self.release()

    def end(self) -> None:
        """Let malloc do as before; after a large call, give back what is free by now."""
        self.release()
        large, self._large, self._end, self.active = self._large, False, None, False
        if large and (native := _native()) is not None:
            native.heap_trim()

    def release(self) -> None:
        """Let malloc do as before; what is free is given back at the end."""
        if self._on and (native := _native()) is not None:
            with suppress(IndexError):
                self._on.pop()
                native.heap_hold(-1)
                self._idle.append(True)

    def __del__(self) -> None:
        self.release()


@contextmanager
def giving_back(size: int = LARGE) -> Iterator[None]:
    """Give back what a call that makes copies took in between; nothing of few bytes a layer."""
    hold = Hold()
    hold.begin(FEW + 1, size, torch.device("cpu"))
    try:
        yield
    finally:
        hold.end()
