"""Finds and loads the shared library, and chooses the instruction set.

Native calls run on the threads of the OpenMP library that torch has loaded, whose waiting threads
would else hold the cores. Where there is none, where its threads sleep between their regions
(``OMP_WAIT_POLICY=passive``), and in a child of fork, kvpact has its own.
"""

from __future__ import annotations

import ctypes
import os
import sys
from ctypes import c_int
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from kvpact.errors import BackendUnavailable
from kvpact.kernels.cpu.structs import ABI, FUNCTIONS

_LINKED = {"win32": "libiomp5md.dll", "darwin": "libtorch_cpu.dylib"}
_LLVM = "__kmpc_fork_call", "__kmpc_global_thread_num", "__kmpc_push_num_threads"


def entries() -> tuple[int, int, int, int]:
    """Return the addresses that `kvp_openmp` takes; of OpenMP's two kinds one, or none."""
    if os.environ.get("OMP_WAIT_POLICY", "").lower() == "passive":
        return 0, 0, 0, 0
    linked = Path(torch.__file__).parent / "lib" / _LINKED.get(sys.platform, "libtorch_cpu.so")
    # As torch's own calls are resolved: what the whole process sees comes first.
    places: list[str | None] = [] if sys.platform == "win32" else [None]
    places += [str(linked)] * linked.is_file()
    for library in map(ctypes.CDLL, places):
        gomp, *llvm = (_address(library, name) for name in ("GOMP_parallel", *_LLVM))
        if gomp or all(llvm):
            return (gomp, 0, 0, 0) if gomp else (0, llvm[0], llvm[1], llvm[2])
    return 0, 0, 0, 0


def _address(library: ctypes.CDLL, name: str) -> int:
    found: Any = getattr(library, name, None)
    return ctypes.cast(found, ctypes.c_void_p).value or 0


LEVELS = {"none": 1, "neon": 8, "avx2": 2, "avx512": 4, "avx512vbmi": 16}
"""Instruction sets by the names that ``KVPACT_SIMD`` takes: a cap, not a demand. The one named and
those before it may be chosen, of those that the processor has."""


def file_name(platform: str = sys.platform) -> str:
    """Return what the shared library is called on a platform, by its `sys.platform`."""
    return "libkvpact_cpu" + {"darwin": ".dylib", "win32": ".dll"}.get(platform, ".so")


class NativeLibrary:
    """The loaded library at the last of `levels`; `openmp`: whether it uses torch's threads."""

    def __init__(self, path: Path, levels: list[str]) -> None:
        self.path, self.levels, self.level = path, levels, levels[-1]
        self.loaded = loaded = ctypes.CDLL(str(path))
        for name, (result, arguments) in FUNCTIONS.items():
            function = getattr(loaded, name)
            function.restype, function.argtypes = result, arguments
        self.attend, self.attend_rows = loaded.kvp_attend, loaded.kvp_attend_rows
        self.encode, self.decode = loaded.kvp_encode, loaded.kvp_decode
        self.prompt, self.step = loaded.kvp_prompt, loaded.kvp_step
        self.scan, self.gather = loaded.kvp_scan, loaded.kvp_gather
        self.magnitudes = loaded.kvp_magnitudes
        # With the interpreter's lock held: no other thread, and no fork, comes in between.
        self.heap_trim, self.heap_hold = loaded.kvp_heap_trim, ctypes.PyDLL(str(path)).kvp_heap_hold
        self.heap_hold.restype, self.heap_hold.argtypes = FUNCTIONS["kvp_heap_hold"]
        self.bit = LEVELS[self.level]
        self.openmp = bool(loaded.kvp_openmp(*entries()))


def _find() -> Path | None:
    """Return the library that was installed, or the one that ``KVPACT_NATIVE`` names."""
    named = os.environ.get("KVPACT_NATIVE")
    if named:
        return Path(named)

    # An editable install has two folders: the sources, and what was built from them.
    for folder in sys.modules[__name__.rpartition(".")[0]].__path__:
        path = Path(folder) / file_name()
        if path.is_file():
            return path
    return None


def cap() -> str:
    """Return the highest instruction set that ``KVPACT_SIMD`` allows."""
    wanted = os.environ.get("KVPACT_SIMD", "").strip().lower() or [*LEVELS][-1]
    if wanted not in LEVELS:
        raise BackendUnavailable(f"KVPACT_SIMD={wanted!r} is not one of {', '.join(LEVELS)}")
    return wanted


@lru_cache(maxsize=1)
def _load() -> NativeLibrary | str:
    path = _find()
    if path is None:
        return "not built: kvpact was installed without CMake or a C++17 compiler"
    try:
        loaded = ctypes.CDLL(str(path))
        loaded.kvp_abi.restype = loaded.kvp_levels.restype = c_int
        if loaded.kvp_abi() != ABI:
            return f"{path.name} is of another version of kvpact; install kvpact again"
        found = loaded.kvp_levels()
    except (OSError, AttributeError) as error:
        return f"{path.name} can't be loaded: {error}"
    try:
        allowed = [*LEVELS][: [*LEVELS].index(cap()) + 1]
    except BackendUnavailable as error:
        return str(error)
    levels = [name for name in allowed if found & LEVELS[name]]
    if not levels:
        return (
            f"{path.name} has none of the instruction sets of this processor that KVPACT_SIMD "
            "allows: it was compiled for another one alone. Install kvpact again, with all of them "
            "by pip install -e . -C cmake.define.KVP_LEVELS=all"
        )
    try:
        return NativeLibrary(path, levels)
    except AttributeError:  # built from older sources: a function is not there yet
        return f"{path.name} is of another version of kvpact; install kvpact again"


def native_threads() -> str:
    """Return on whose threads native calls run."""
    found = _load()
    if isinstance(found, str):
        return "no native calls"
    return "native calls on torch's OpenMP" if found.openmp else "native calls on kvpact's own"


def library() -> NativeLibrary:
    """Return the library, loaded once per process. Raises `BackendUnavailable`."""
    found = _load()
    if isinstance(found, str):
        raise BackendUnavailable(found)
    return found
