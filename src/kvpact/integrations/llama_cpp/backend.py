"""The shared library: where it is, what loads it into a program, and loading it in this process."""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from kvpact.errors import BackendUnavailable

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


class EnabledGgml(NamedTuple):
    """kvpact inside the ggmls of this process."""

    libraries: tuple[Path, ...]  # that hold these ggmls
    found: str  # version and interface of the one that was loaded into last, error of a trial
    plugin: Any

    @property
    def attentions(self) -> int:
        """Attentions that kvpact has computed; 0 after a generation: loaded, and not used."""
        return int(self.plugin.kvpact_ggml_computed())


def enable() -> EnabledGgml:
    """Make an imported llama.cpp attend with kvpact in this process.

    Call it after the import of a binding (llama-cpp-python, xllamacpp, llama-cpp-py-sync or any
    other whose libraries show ggml's functions) and before its first model: a model that was made
    before goes on without kvpact. Attention is kvpact's where a context has flash attention and a
    quantised cache in host memory. A second call loads nothing.

    Returns
    -------
    EnabledGgml
        Counts the attentions that kvpact has computed.

    Raises
    ------
    BackendUnavailable
        No ggml is there, or one refuses it; kvpact was installed without the backend; Windows.
    """
    if sys.platform == "win32":
        raise BackendUnavailable("enable() is for Linux and macOS: set GGML_BACKEND_PATH instead")
    path = library()
    plugin, ggmls = _plugin(path), _ggmls()
    if not ggmls:
        raise BackendUnavailable(
            "no library of this process shows ggml's ggml_backend_load: call enable() after the "
            "import of a binding of llama.cpp, such as xllamacpp"
        )
    for file, ggml in ggmls.items():
        # Backends that are loaded are so before the first model, and only while there is none.
        if not ggml.ggml_backend_reg_count():
            ggml.ggml_backend_load_all_from_path(os.fsencode(file.parent))
        if ggml.ggml_backend_dev_by_name(DEVICE.encode()):
            continue
        ggml.ggml_backend_load(os.fsencode(path))
        if not ggml.ggml_backend_dev_by_name(DEVICE.encode()):
            reason = (plugin.kvpact_ggml_refused() or b"its log says why").decode()
            raise BackendUnavailable(f"kvpact can't be loaded into {file}: {reason}")
    return EnabledGgml(tuple(ggmls), plugin.kvpact_ggml_found().decode(), plugin)


def _plugin(path: Path) -> Any:
    """Return the backend, whose functions report what it found and what it computed."""
    try:
        plugin = ctypes.CDLL(str(path))
        plugin.kvpact_ggml_computed.restype = ctypes.c_int64
        plugin.kvpact_ggml_found.restype = plugin.kvpact_ggml_refused.restype = ctypes.c_char_p
    except (OSError, AttributeError) as error:
        raise BackendUnavailable(f"{path} is not kvpact's backend for ggml: {error}") from None
    return plugin


def _ggmls() -> dict[Path, Any]:
    """Return the ggmls of this process by the libraries that hold them, each of them once."""
    found: dict[Path, Any] = {}
    for file in _libraries():
        try:  # a library shows what those show that it is linked with, too
            address = ctypes.cast(_opened(file).ggml_backend_load, ctypes.c_void_p)
        except (OSError, AttributeError):
            continue
        info = (ctypes.c_char_p * 4)()  # a Dl_info, whose first pointer is the file's name
        ctypes.CDLL(None).dladdr(address, info)
        owner = os.fsdecode(info[0] or b"")
        found[Path(owner)] = ggml = _opened(owner)
        for name in ("ggml_backend_dev_by_name", "ggml_backend_load"):
            getattr(ggml, name).restype = ctypes.c_void_p
        ggml.ggml_backend_reg_count.restype = ctypes.c_size_t
    return found


def _opened(file: str) -> Any:
    """Return a library that this process has loaded; `OSError` if it has not."""
    return ctypes.CDLL(file, os.RTLD_NOLOAD)


def _libraries() -> Iterable[str]:
    """Return the paths of the libraries that this process has loaded."""
    if sys.platform == "darwin":
        dyld = ctypes.CDLL(None)
        dyld._dyld_get_image_name.restype = ctypes.c_char_p
        images = range(dyld._dyld_image_count())
        return [os.fsdecode(dyld._dyld_get_image_name(i) or b"") for i in images]
    lines = os.fsdecode(Path("/proc/self/maps").read_bytes()).splitlines()
    mapped = dict.fromkeys(line[line.index("/") :] for line in lines if "/" in line)
    return [path for path in mapped if ".so" in os.path.basename(path)]
