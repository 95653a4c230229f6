"""The library for llama.cpp refuses what was not tried, and exports three functions.

What it computes is compared with numpy here, and with ggml's own operations by ggml's
test-backend-ops, which `kvpact llama-cpp check` runs.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import kvpact.integrations

NAME = "libggml-kvpact.so"  # on every system: so ggml names backends, and CMake modules
NAMED = os.environ.get("KVPACT_GGML_LIBRARY")
FOLDERS = [Path(folder) / "llama_cpp" for folder in kvpact.integrations.__path__]
FOUND = [Path(NAMED)] if NAMED else [f / NAME for f in FOLDERS if (f / NAME).is_file()]
SOURCES = Path(__file__).parents[2] / "src/kvpact/kernels/cpu/native/ggml"

pytestmark = pytest.mark.skipif(not FOUND, reason=f"{NAME} is not built")

LOAD = """
import ctypes, os, sys
for path in sys.argv[2:]:
    ctypes.CDLL(path, os.RTLD_LOCAL)
loaded = ctypes.CDLL(sys.argv[1])
loaded.kvpact_ggml_refused.restype = ctypes.c_char_p
loaded.ggml_backend_init.restype = ctypes.c_void_p
line = loaded.kvpact_ggml_refused()
print(loaded.ggml_backend_score(), loaded.ggml_backend_init() is not None, line and line.decode())
"""
FAKE = """
const char *ggml_version(void) { return "%s"; }
void *ggml_backend_cpu_buffer_type(void) { return 0; }
int ggml_graph_n_nodes(void *graph) { return 1; }
void *ggml_graph_node(void *graph, int i) { return graph; }
void *load(void *(*init)(void)) { void *volatile made = init(); return made; }
"""


def run(code: str, *arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a program with the library in a process of its own."""
    command = [sys.executable, "-c", code, str(FOUND[0]), *map(str, arguments)]
    clean = {k: v for k, v in os.environ.items() if not k.startswith("KVPACT_GGML")}
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=60, env=clean | environment
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done


def answer(*libraries: Path, **environment: str) -> str:
    """Return the score, whether it would register, and the reason."""
    done = run(LOAD, *libraries, **environment)
    why = done.stdout.split(maxsplit=2)[2]
    assert done.stderr == ("" if why == "None\n" else f"kvpact: {why}")
    return done.stdout.strip()


@pytest.fixture
def ggml(tmp_path):
    """A library that says of itself that it is some version of ggml."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler")

    def make(version: str) -> Path:
        source, library = tmp_path / "fake.c", tmp_path / f"libggml-base-{version}.so"
        source.write_text(FAKE % version)
        subprocess.run([compiler, "-shared", "-fPIC", source, "-o", library], check=True)
        return library

    return make


def test_without_ggml_nothing_is_registered():
    assert answer() == "0 False no ggml that shows its functions is loaded in this process"


def test_another_version_is_refused_by_name(ggml):
    line = "0 False ggml 0.99.0 was not tried with this version of kvpact, only 0.25.3"
    assert answer(ggml("0.99.0")) == line


def test_of_two_ggmls_the_one_that_loads_counts(ggml):
    tried, other = map(str, (ggml("0.25.3"), ggml("0.99.0")))
    code = (
        LOAD
        + """
for path in sys.argv[2:]:
    load = ctypes.CDLL(path).load
    load.restype, load.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
    print(load(loaded.ggml_backend_init) is not None)
"""
    )
    for libraries, found in (
        ([tried, other], ["True", "False"]),
        ([other, tried], ["False", "True"]),
    ):
        assert run(code, *libraries).stdout.split()[-2:] == found


def test_an_instruction_set_that_does_not_exist_is_refused_by_name(ggml):
    line = "0 False KVPACT_GGML_SIMD is not one of none, neon, avx2, avx512, avx512vbmi"
    assert answer(ggml("0.25.3"), KVPACT_GGML_SIMD="sse9") == line


def test_the_versions_tried_are_those_of_the_source(ggml):
    (table,) = re.findall(r"TRIED\[\] = \{(.*)\}", (SOURCES / "ggml_abi.h").read_text())
    for version in re.findall(r'"(.*?)"', table):
        assert answer(ggml(version)) == "1 True None"


@pytest.mark.parametrize("level", ["none", "neon", "avx2", "avx512"])
def test_operations_are_those_of_numpy(ggml, level):
    if level == ("neon" if platform.machine() in ("x86_64", "AMD64") else "avx2"):
        pytest.skip("for another processor")
    program = (Path(__file__).parent / "ggml_operations.py").read_text()
    done = run(program, ggml("0.25.3"), KVPACT_GGML_ALL="1", KVPACT_GGML_SIMD=level)
    assert done.stdout.endswith("operations 0 wrong\n"), done.stdout


@pytest.mark.llama
def test_errors_are_those_of_ggmls_operations(ggml):
    (cpu, *_) = sorted(SOURCES.parents[5].glob("build/llama/*/linked/bin/libggml-cpu.so"))
    program = (Path(__file__).parent / "ggml_operations.py").read_text()
    done = run(program, ggml("0.25.3"), cpu, KVPACT_GGML_ALL="1")
    print(done.stdout)
    assert done.stdout.endswith("operations 0 wrong\n"), done.stdout


@pytest.mark.skipif(sys.platform == "darwin" or not shutil.which("nm"), reason="needs nm of ELF")
def test_nothing_else_is_exported():
    listed = subprocess.run(
        ["nm", "-D", "--defined-only", FOUND[0]], capture_output=True, text=True
    )
    names = sorted(line.split()[-1] for line in listed.stdout.splitlines())
    assert names == ["ggml_backend_init", "ggml_backend_score", "kvpact_ggml_refused"]
