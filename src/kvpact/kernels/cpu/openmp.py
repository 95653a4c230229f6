"""On whose threads the native kernels run: on those of the OpenMP library that torch has loaded.

After each of its parallel regions torch's threads wait for the next one on the cores, for some
milliseconds. Threads of kvpact's own would have to take the cores from them, so its calls are
regions of the same library. Where there is none, where its threads sleep between their regions
(``OMP_WAIT_POLICY=passive``), and in a child of fork, kvpact has its own.
"""

from __future__ import annotations

import ctypes
import os
import sys
from pathlib import Path
from typing import Any

import torch

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
