"""`kvpact llama-cpp check` where libraries are without programs: modules, Node.js, folders."""

import json
import shutil

import pytest
from commands import bad, good, invoke
from fake_ggml import GGML, PLUGIN, compiled

BINS = "node_modules/@node-llama-cpp"


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A ggml, a backend that loads into it and one that does not."""
    folder = tmp_path_factory.mktemp("made")
    good, refused = (compiled(folder / f"{x}.so", PLUGIN, f"-DREFUSED={x}") for x in (0, 1))
    return compiled(folder / "ggml.so", GGML), good, refused


@pytest.fixture
def place(made, tmp_path, monkeypatch):
    """Puts a ggml somewhere below a folder."""
    monkeypatch.setenv("KVPACT_GGML_LIBRARY", str(made[1]))

    def put(name):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        return shutil.copy(made[0], path)

    return put


def test_a_project_of_node_is_checked(place, made, tmp_path):
    for kind in ("linux-x64", "linux-x64-cuda"):
        path = place(f"{BINS}/{kind}/bins/{kind}/libggml.b9.so")
        for variant in ("cpu-haswell", "cpu-zen4"):
            path.with_name(f"libggml-{variant}.so").touch()
    path.with_name("libggml-cuda.so").touch()
    place("node_modules/else/libggml.so")
    cpu, cuda = json.loads(good("llama-cpp", "check", tmp_path, "--json"))["ggmls"]
    assert cpu == {
        "folder": str(tmp_path / BINS / "linux-x64/bins/linux-x64"),
        "found": "ggml 9.9.9, interface 6",
        "refused": "",
        "gpu": [],
        "line": f'process.env.GGML_BACKEND_PATH = "{made[1]}" // before getLlama()',
    }
    assert cuda["gpu"] == ["cuda"] and cuda["line"] == cpu["line"]
    told = good("llama-cpp", "check", tmp_path)
    assert "loads kvpact: ggml 9.9.9, interface 6" in told and f"by {cpu['line']}" in told
    assert "layers on the GPU (cuda) keep their caches and attention there" in told


@pytest.mark.parametrize("libraries", ["some_llama/lib", "some_llama", "some_llama.libs"])
def test_a_module_is_found_and_not_imported(place, tmp_path, monkeypatch, libraries):
    place(f"{libraries}/libggml.so.0.9")
    (tmp_path / "some_llama").mkdir(exist_ok=True)
    (tmp_path / "some_llama" / "__init__.py").write_text("raise AssertionError")
    monkeypatch.syspath_prepend(tmp_path)
    (one,) = json.loads(good("llama-cpp", "check", "some_llama", "--json"))["ggmls"]
    assert one["folder"] == str(tmp_path / libraries) and one["refused"] == ""
    assert one["line"].startswith("kvpact.integrations.llama_cpp.enable()")


def test_a_program_finds_the_libraries_beside_it(place, made, tmp_path):
    place("lib/libggml.so")
    program = tmp_path / "bin" / "some-program"
    program.parent.mkdir()
    program.touch()
    told = good("llama-cpp", "check", program)
    assert f"by export GGML_BACKEND_PATH={made[1]} LLAMA_ARG" in told


def test_a_reason_is_told(place, made, tmp_path, monkeypatch):
    place("a/libggml.so")
    compiled(tmp_path / "b" / "libggml.so", GGML, "-DCRASH")
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / "libggml.so").write_bytes(b"no library, but ggml_backend_load\0")
    a, b, c = json.loads(good("llama-cpp", "check", tmp_path, "--json"))["ggmls"]
    assert a["refused"] == "" and "libggml.so: " in c["refused"]
    assert b["refused"].startswith("a process that loaded it ended with -6: ")
    monkeypatch.setenv("KVPACT_GGML_LIBRARY", str(made[2]))
    assert "ggml 9.9.9: odd" in bad("llama-cpp", "check", tmp_path / "a")
    assert invoke("llama-cpp", "check", tmp_path).stdout.count("no kvpact: ") == 3
