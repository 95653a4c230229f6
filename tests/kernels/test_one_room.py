"""ctypes stands in one room, and beside ggml: everything else knows of backends."""

import ast
from pathlib import Path

import kvpact

ROOT = Path(kvpact.__file__).parent


def imported(path: Path) -> set[str]:
    """Return the top-level modules that a file imports."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module.split(".")[0])
    return found


GGML = "integrations/llama_cpp/backend.py"


def test_ctypes_is_imported_by_the_cpu_backend_and_beside_ggml_alone():
    users = {p.relative_to(ROOT).as_posix() for p in ROOT.rglob("*.py") if "ctypes" in imported(p)}
    assert GGML in users and all(path.startswith("kernels/cpu/") for path in users - {GGML})


def test_no_room_but_kernels_knows_a_backends_parts():
    """What computes is reached through plans."""
    for path in ROOT.rglob("*.py"):
        if "kernels" not in path.relative_to(ROOT).parts:
            assert "kvpact.kernels.cpu" not in path.read_text("utf-8"), path
