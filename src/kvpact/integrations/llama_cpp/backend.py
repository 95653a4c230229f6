"""The shared library: where it is, what loads it into a program, and loading it in this process."""

from __future__ import annotations

import ctypes
import os
import sys
from importlib import import_module
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from kvpact.errors import BackendUnavailable, EnableError

NAME = "libggml-kvpact" + (".dll" if sys.platform == "win32" else ".so")
DEVICE = "KVPACT"
"""The name of the device that the backend brings."""
PARSED = {"LLAMA_ARG_OVERRIDE_TENSOR": "none=CPU"}
"""Has a program's parser of arguments load backends, as ``-ot none=CPU``: no tensor is ``none``."""


def library() -> Path:
    """Return the path of the installed backend, or of the one that ``KVPACT_GGML_LIBRARY`` names.

    Raises
    ------
    BackendUnavailable
        There is none.
    """
    if named := os.environ.get("KVPACT_GGML_LIBRARY"):
        found = [Path(named).absolute()]
    else:
        # An editable install has two folders: the sources, and what was built from them.
        package = sys.modules[__name__.rpartition(".")[0]]
        found = [Path(folder) / NAME for folder in package.__path__]
    for path in found:
        if path.is_file():
            return path
    raise BackendUnavailable(
        f"there is no backend for ggml at {' or '.join(map(str, found))}: the wheels hold "
        "one, and an installation from source compiles one where it finds CMake and a "
        "C++ compiler"
    )


def environment(*, every_program: bool = True) -> dict[str, str]:
    """Return the variables that load the backend into a program of llama.cpp.

    Parameters
    ----------
    every_program : bool
        Include ``LLAMA_ARG_OVERRIDE_TENSOR``, which most programs need that were built without
        dynamic backends (``GGML_BACKEND_DL``), since they don't read ``GGML_BACKEND_PATH`` by
        themselves. It moves no tensor; an ``-ot`` of yours takes its place and its effect.

    Returns
    -------
    dict of str to str
        To be added to ``os.environ`` for a child process.

    Raises
    ------
    BackendUnavailable
        kvpact was installed without the backend.
    """
    return {"GGML_BACKEND_PATH": str(library())} | (PARSED if every_program else {})


def enable() -> None:
    """Have llama-cpp-python attend with kvpact in this process; call it before the first model.

    Attention is kvpact's where a context has flash attention and its cache is in host memory:
    ``Llama(..., flash_attn=True, type_k=8, type_v=8)`` for a cache of ``q8_0``. A second call does
    nothing.

    Raises
    ------
    BackendUnavailable
        llama-cpp-python is not installed, kvpact was installed without the backend, or the version
        of ggml is not one that it was tried with.
    EnableError
        A model was made before, which would go on without kvpact.
    """
    if find_spec("llama_cpp") is None:
        raise BackendUnavailable("llama-cpp-python is not installed: pip install llama-cpp-python")
    path = library()
    llama = import_module("llama_cpp").Llama
    # By llama.cpp's own library, which looks up functions of its ggml: llama_cpp._ggml has another
    # copy where wheels hold copies in place of links, with a registry of its own.
    ggml = import_module("llama_cpp.llama_cpp")._lib
    for name in ("ggml_backend_dev_by_name", "ggml_backend_load"):
        getattr(ggml, name).restype = ctypes.c_void_p
    if ggml.ggml_backend_dev_by_name(DEVICE.encode()):
        return
    if getattr(llama, "_Llama__backend_initialized", False):
        raise EnableError(
            "a model was made before enable(), and would go on without kvpact: call "
            "kvpact.integrations.llama_cpp.enable() before the first Llama(...)"
        )
    installed = f"llama-cpp-python {version('llama-cpp-python')}"
    if reason := refusal(path):
        raise BackendUnavailable(f"kvpact can't be loaded into {installed}: {reason}")
    # llama.cpp loads its own backends only while there is none.
    if not ggml.ggml_backend_reg_count():
        ggml.ggml_backend_load_all()
    ggml.ggml_backend_load(os.fsencode(path))
    if not ggml.ggml_backend_dev_by_name(DEVICE.encode()):
        raise BackendUnavailable(f"{installed} did not load {path}; its log says why")


def refusal(path: Path) -> str:
    """Return why a backend can't be loaded beside the ggml of this process, "" where it can."""
    try:
        loaded: Any = ctypes.CDLL(str(path))
        asked = loaded.kvpact_ggml_refused
    except (OSError, AttributeError) as error:
        return str(error)
    asked.restype = ctypes.c_char_p
    return (asked() or b"").decode()
