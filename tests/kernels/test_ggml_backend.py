"""The library for llama.cpp finds out which ggml loads it, or refuses it by name.

`fake_ggml.cpp` is loaded in its place, in processes of their own. What is computed is compared with
numpy here, and with ggml's own operations by its test-backend-ops (`kvpact llama-cpp check`).
"""

import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import kvpact.integrations

NAME = "libggml-kvpact.so"  # on macOS, too: so ggml names backends
NAMED = os.environ.get("KVPACT_GGML_LIBRARY")
FOLDERS = [Path(folder) / "llama_cpp" for folder in kvpact.integrations.__path__]
FOUND = [Path(NAMED)] if NAMED else [f / NAME for f in FOLDERS if (f / NAME).is_file()]
HERE = Path(__file__).parent

pytestmark = pytest.mark.skipif(not FOUND, reason=f"{NAME} is not built")

LOAD = """
import ctypes, sys
library, *ggmls = sys.argv[1:]
for path in ggmls:
    ggml = ctypes.CDLL(path)
    ggml.ggml_backend_load.restype = ctypes.c_void_p
    loaded = [ggml.ggml_backend_load(library.encode()) is not None for _ in "12"]
    print(*loaded, ggml.ggml_backend_reg_count(), end=" ")
ours = ctypes.CDLL(library)
ours.kvpact_ggml_found.restype = ours.kvpact_ggml_refused.restype = ctypes.c_char_p
ours.ggml_backend_init.restype = ctypes.c_void_p
if not ggmls:
    print(ours.ggml_backend_score(), ours.ggml_backend_init(), end=" ")
print(ours.kvpact_ggml_found().decode(), ours.kvpact_ggml_refused().decode(), sep="|")
"""


def run(code: str, *arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a program with the library in a process of its own."""
    command = [sys.executable, "-c", code, str(FOUND[0]), *map(str, arguments)]
    clean = {k: v for k, v in os.environ.items() if not k.startswith("KVPACT_GGML")}
    clean["PYTHONPATH"] = str(HERE)
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=60, env=clean | environment
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done


@pytest.fixture(scope="module")
def fake(tmp_path_factory):
    """Compile a ggml with some macros."""
    compiler = shutil.which("c++") or shutil.which("g++")
    if compiler is None:
        pytest.skip("no C++ compiler")
    folder, made = tmp_path_factory.mktemp("ggml"), {}

    def make(*macros: str) -> Path:
        if macros not in made:
            made[macros] = folder / f"libggml-{len(made)}.so"
            right = ("SCALE=1", "SLOPE=1", "Q8_NUMBER=8")
            words = ["-std=c++17", "-O1", "-shared", "-fPIC", "-w", HERE / "fake_ggml.cpp"]
            words += [f"-D{macro}" for macro in (*right, *macros)]
            subprocess.run([compiler, *words, "-o", made[macros]], check=True)
        return made[macros]

    return make


@pytest.mark.parametrize(("layout", "found"), [
    ((), "ggml 0.25.3, interface 2"),
    (("HAS_A_GPU",), "ggml 0.25.3, interface 2"),
    (("OLD",), "ggml without a version, interface 1"),
    (("SHUFFLED",), "ggml 0.25.3, interface 6"),
])  # fmt: skip
def test_any_layout_loads_once(fake, layout, found):
    done = run(LOAD, fake(*layout))
    start, error = done.stdout.strip().removesuffix("|").split(", trial NMSE ")
    assert start == f"True False 2 {found}"
    assert float(error) < 1e-4
    assert done.stderr == "kvpact: this ggml has loaded it already\n"


TRIAL = "a trial of attention ({}) failed: the result is not ggml's"


@pytest.mark.parametrize(("macro", "why"), [
    ("ggml_graph_node=other", "it has no function ggml_graph_node"),
    ("NO_BACKEND", "its CPU backend has to be loaded before kvpact's"),
    ("DISAGREE", "its backends do not begin with the number of its interface"),
    ("NOT_CLEARED", "its devices' properties are not as kvpact expects"),
    ("Q8_NUMBER=9", "its type 8 is not q8_0"),
    ("ALWAYS=7", "its attention has numbers or sources that kvpact does not know"),
    ("SYNCHRONIZED", "a copy of the process that tried it ended with signal 11"),
    ("SCALE=1.05", TRIAL.format("a token over q8_0")),
    ("SLOPE=2", TRIAL.format("two streams over q4_0")),
    ("THREE_IS_A_GPU", "it takes kvpact's device for a GPU"),
])  # fmt: skip
def test_another_ggml_is_refused_by_name_and_lives_on(fake, macro, why):
    early = macro in ("ggml_graph_node=other", "NO_BACKEND")
    line = f"ggml 0.25.3{'' if early else ', interface 2,'} is refused: {why}"
    count = {"NO_BACKEND": 0, "DISAGREE": 2}.get(macro, 1)
    done = run(LOAD, fake(macro))
    assert done.stdout == f"False False {count} |{line}\n"
    assert done.stderr == f"kvpact: {line}\n" * 2


def test_a_process_that_may_not_be_copied_is_refused_by_name(fake):
    ggml = fake("NO_COPIES")
    line = "no copy of the process can be made to try it: Operation not permitted"
    assert run(LOAD, ggml, LD_PRELOAD=str(ggml)).stdout.endswith(f"is refused: {line}\n")


def test_without_ggml_nothing_is_registered():
    line = "no ggml that shows its functions is loaded in this process"
    assert run(LOAD).stdout == f"0 None |{line}\n"


def test_an_instruction_set_that_does_not_exist_is_refused_by_name(fake):
    line = "KVPACT_GGML_SIMD is not one of none, neon, avx2, avx512, avx512vbmi"
    assert run(LOAD, fake(), KVPACT_GGML_SIMD="sse9").stdout.endswith(f"is refused: {line}\n")


def test_a_ggml_whose_backend_comes_late_is_asked_again(fake):
    again = "ggml.ggml_backend_load_all()\nprint(bool(ggml.ggml_backend_load(library.encode())))"
    assert run(f"{LOAD}\n{again}", fake("NO_BACKEND")).stdout.endswith("\nTrue\n")


USE = """
import ctypes, sys
from ggml_operations import Case, Library, Operation, distance
path, *ggmls = sys.argv[1:]
libraries = [Library(path, ggml) for ggml in ggmls]
operation = Operation(Case("q8_0", "q8_0", 64, 64, heads=2, groups=2, tokens=600, queries=3), 1)
op, _ = operation.node()
"""


def test_each_ggml_of_a_process_is_used_and_attentions_are_counted(fake):
    code = f"""{USE}
for library in libraries:
    result = library(operation)
    print(min(distance(result, operation.expected(coded)) for coded in (False, True)) < 1e-8)
print(ctypes.CDLL(path).kvpact_ggml_computed())
"""
    done = run(code, fake(), fake("THE_SAME_AGAIN"), KVPACT_GGML_COUNT="1")
    assert done.stdout.split() == ["True", "True", "2"]
    assert done.stderr == "kvpact: computed 2 attentions\n"
    both = run(LOAD, fake(), fake("SHUFFLED")).stdout
    assert both.startswith("True False 2 True False 2 ggml 0.25.3, interface 6")


def test_what_the_probes_did_not_explain_is_left_to_ggml(fake):
    code = f"""{USE}
for place, number in (3, 10), (4, 99), (5, 1), (15, 1):  # precision, n_kv_max, unknown ones
    op.params[place] = number
    print(libraries[0].takes(op), end=" ")
    op.params[place] = 0
for source in 4, 5, 9:  # sinks, unknown ones
    op.src[source] = op.src[0]
    print(libraries[0].takes(op), end=" ")
    op.src[source] = None
"""
    assert run(code, fake()).stdout == "True True False False True False False "


@pytest.mark.parametrize("level", ["none", "neon", "avx2", "avx512"])
def test_operations_are_those_of_numpy(fake, level):
    if level == ("neon" if platform.machine() in ("x86_64", "AMD64") else "avx2"):
        pytest.skip("for another processor")
    program = (HERE / "ggml_operations.py").read_text()
    done = run(program, fake(), KVPACT_GGML_ALL="1", KVPACT_GGML_SIMD=level)
    assert done.stdout.endswith("operations 0 wrong\n"), done.stdout


@pytest.mark.llama
def test_errors_are_those_of_ggmls_operations(fake):
    (cpu, *_) = sorted(HERE.parents[1].glob("build/llama/*/linked/bin/libggml-cpu.so"))
    program = (HERE / "ggml_operations.py").read_text()
    done = run(program, fake(), cpu, KVPACT_GGML_ALL="1")
    print(done.stdout)
    assert done.stdout.endswith("operations 0 wrong\n"), done.stdout


@pytest.mark.skipif(sys.platform == "darwin" or not shutil.which("nm"), reason="needs nm of ELF")
def test_nothing_else_is_exported():
    listed = subprocess.run(
        ["nm", "-D", "--defined-only", FOUND[0]], capture_output=True, text=True
    )
    names = sorted(line.split()[-1] for line in listed.stdout.splitlines())
    ours = [f"kvpact_ggml_{name}" for name in ("computed", "found", "refused")]
    assert names == ["ggml_backend_init", "ggml_backend_score", *ours]
