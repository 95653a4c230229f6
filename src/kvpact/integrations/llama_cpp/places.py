"""Places of a ggml outside llama.cpp's own programs: Python modules, Node.js projects, folders.

Each is tried in a process of its own, into which its libraries and then kvpact's are loaded.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from mmap import ACCESS_READ, mmap
from pathlib import Path
from shlex import quote
from typing import NamedTuple

from kvpact.errors import BackendUnavailable
from kvpact.integrations.llama_cpp.backend import environment, library
from kvpact.integrations.llama_cpp.programs import run

LIBRARY = re.compile(r"\.(so|dylib)(\.[\d.]+)?$")
GPU = re.compile(r"libggml-(cuda|hip|vulkan|metal|sycl|opencl|musa|cann|webgpu)\b")
EXPORTED = b"ggml_backend_load\0"
LOAD = """
import ctypes, json, sys
from kvpact.errors import KVPactError
from kvpact.integrations.llama_cpp import enable
failed = []
for path in sys.argv[1:]:
    try:
        ctypes.CDLL(path)
    except OSError as error:
        failed.append(str(error))
try:
    print(json.dumps([enable().found, ""]))
except KVPactError as error:
    print(json.dumps(["", failed[0] if len(failed) == len(sys.argv) - 1 else str(error)]))
"""


class Tried(NamedTuple):
    """A ggml that was tried."""

    folder: str
    found: str  # its version, its interface and the error of a trial
    refused: str  # why it does not load kvpact; "" where it does
    gpu: list[str]  # backends whose layers, caches and attention stay where they are
    line: str  # what has it load kvpact


def tried(where: str) -> list[Tried]:
    """Load kvpact into each ggml of a place; `BackendUnavailable` where there is none.

    `where` is a folder of libraries, a program next to them, a folder with ``node_modules``, or a
    Python module's name, which is not imported.
    """
    found: dict[Path, list[Path]] = {}
    for path in sorted({file.resolve() for root in roots(where) for file in _files(root)}):
        if LIBRARY.search(path.name) and path.is_file() and _exports(path):
            found.setdefault(path.parent, []).append(path)
    if not found:
        raise BackendUnavailable(
            f"{where} has neither programs of llama.cpp nor a library that shows ggml's functions: "
            "name a program, a folder, a Python module or a folder with node_modules"
        )
    return [_tried(folder, files) for folder, files in found.items()]


def roots(where: str) -> list[Path]:
    """Return where to look; `BackendUnavailable` for what is neither a path nor a module."""
    if Path(where).exists():
        return [Path(where)]
    try:
        spec = find_spec(where) if where.isidentifier() else None
    except ValueError:  # a module that is there, and has none
        spec = None
    if spec is None:
        raise BackendUnavailable(f"{where} is neither a path nor a Python module that is installed")
    places = spec.submodule_search_locations or [spec.origin or ""]
    return [Path(place + more) for place in places for more in ("", ".libs")]


def _files(root: Path) -> Iterator[Path]:
    """Yield the files of a place among which its libraries are."""
    if (modules := root / "node_modules" / "@node-llama-cpp").is_dir():
        return modules.glob("*/bins/*/*")
    if root.is_dir():
        return root.rglob("*")
    return (x for place in (".", "../lib") for x in (root.parent / place).glob("*"))


def _exports(path: Path) -> bool:
    """Return whether a library names the function that loads a backend."""
    if not path.stat().st_size:
        return False
    with path.open("rb") as file, mmap(file.fileno(), 0, access=ACCESS_READ) as text:
        return text.find(EXPORTED) >= 0


def _tried(folder: Path, files: list[Path]) -> Tried:
    # Those of llama.cpp use ggml's functions, and depend on more.
    own = [path for path in files if path.name.startswith("libggml")] or files
    done = run(Path(sys.executable), ["-c", LOAD, *own], {})
    try:
        found, refused = json.loads(done.stdout.splitlines()[-1])
    except (IndexError, ValueError):
        last = (done.stderr.strip() or "no output").splitlines()[-1]
        found, refused = "", f"a process that loaded it ended with {done.returncode}: {last}"
    gpu = {name[1] for path in folder.iterdir() if (name := GPU.match(path.name))}
    return Tried(str(folder), found, refused, sorted(gpu), _line(folder))


def _line(folder: Path) -> str:
    """Return the line that loads kvpact there."""
    if "node_modules" in folder.parts:
        return f"process.env.GGML_BACKEND_PATH = {json.dumps(str(library()))} // before getLlama()"
    packages = (x / "__init__.py" for x in (folder, folder.parent))
    if folder.suffix == ".libs" or any(map(Path.is_file, packages)):
        return "kvpact.integrations.llama_cpp.enable()  # after its import, before a model"
    return "export " + " ".join(f"{name}={quote(x)}" for name, x in environment().items())
