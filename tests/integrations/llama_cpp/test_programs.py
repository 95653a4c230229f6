"""`kvpact llama-cpp` with programs that say what llama.cpp's say (`fake_llama`)."""

import json

import pytest
from commands import bad, good, invoke
from fake_llama import write

from kvpact.errors import KVPactError
from kvpact.integrations.llama_cpp import programs


@pytest.fixture(autouse=True)
def backend(tmp_path, monkeypatch):
    path = tmp_path / "a b.so"
    path.touch()
    monkeypatch.setenv("KVPACT_GGML_LIBRARY", str(path))
    return path


@pytest.fixture
def build(tmp_path):
    return write(tmp_path / "llama" / "build" / "bin").parents[1]


@pytest.fixture
def model(tmp_path):
    path = tmp_path / "model.gguf"
    path.touch()
    return path


def test_the_line_is_one_for_a_shell(backend):
    line = f"export GGML_BACKEND_PATH='{backend}' LLAMA_ARG_OVERRIDE_TENSOR=none=CPU\n"
    result = invoke("llama-cpp")
    assert result.exit_code == 0 and result.stdout == line
    assert "-ctk q8_0" in result.stderr


def test_a_build_is_checked(build, model, backend):
    kinds = ("q8_0", "q4_0")
    more = [word for kind in kinds for word in ("--cache", kind)]
    found = json.loads(good("llama-cpp", "check", build, "--model", model, *more, "--json"))
    assert found["library"] == str(backend)
    assert found["programs"] == {
        "llama-server": "GGML_BACKEND_PATH and -ot none=CPU",
        "llama-cli": "GGML_BACKEND_PATH",
        "llama-perplexity": "?",
    }
    assert found["operations"] == {"passed": 2, "failed": 0, "left": 1}
    row = {"ms": 10.0, "kvpact_ms": 4.0, "attentions": 480, "used": True}
    assert found["times"] == [{"cache": kind, **row} for kind in kinds]


def test_what_is_left_to_ggml_is_told(build, model):
    table = good("llama-cpp", "check", build, "--model", model, "--cache", "f16", "--cache", "q8_0")
    rows = [line.split() for line in table.splitlines()]
    assert ["f16", "10.00", "10.00", "1.00", "no"] in rows
    assert ["q8_0", "10.00", "4.00", "2.50", "yes"] in rows
    assert "LLAMA_ARG_OVERRIDE_TENSOR=none=CPU" in table


def test_a_program_stands_for_its_build(tmp_path):
    folder = write(tmp_path / "own", ["llama-server"])
    table = good("llama-cpp", "check", folder / "llama-server")
    assert "test-backend-ops is not in this build" in table and "--model model.gguf" in table


def test_what_can_not_be_checked_is_refused(build, model, backend, tmp_path, monkeypatch):
    assert "has neither programs of llama.cpp nor" in bad("llama-cpp", "check", tmp_path)
    assert "neither a path nor a Python module" in bad("llama-cpp", "check", "no_such_llama")
    folder = write(tmp_path / "own", ["llama-server"])
    assert "--model needs llama-bench" in bad("llama-cpp", "check", folder, "--model", model)
    refused = backend.with_name("refused.so")
    refused.touch()
    monkeypatch.setenv("KVPACT_GGML_LIBRARY", str(refused))
    assert "ggml 9 is refused: for a test" in bad("llama-cpp", "check", build)
    refused.unlink()
    assert "no backend for ggml" in bad("llama-cpp", "check", build)


def test_operations_that_differ_are_an_error(tmp_path):
    build = write(tmp_path / "other", fails=True)
    result = invoke("llama-cpp", "check", build)
    assert result.exit_code == 2 and "1 operations differ from ggml's" in result.stderr
    assert "not as ggml's 1" in " ".join(result.stdout.split())


def test_an_error_of_a_program_is_told(build):
    bench = programs.programs(build)["llama-bench"]
    with pytest.raises(KVPactError, match="ended with 1: main: error: failed to load model"):
        programs.timing(bench, ["-m", "broken.gguf"], {})


def test_a_program_that_does_not_end_is_ended(build):
    found = programs.programs(build)
    late = "was ended, because it took over 0.5 seconds; --limit allows it more"
    with pytest.raises(KVPactError, match=f"llama-bench {late}"):
        programs.timing(found["llama-bench"], ["endless"], {}, 0.5)
    with pytest.raises(KVPactError, match=f"test-backend-ops {late}"):
        programs.operations(found["test-backend-ops"], "endless", lambda *_: None, 0.5)


def test_devices_are_read():
    text = "x\nAvailable devices:\n  CUDA0: RTX (1 MiB, 1 MiB free)\n  KVPACT: a: b (0 MiB)\n"
    assert programs.listed(text) == ["CUDA0", "KVPACT"]
    assert programs.listed("Available devices:\n  (none)\n") == programs.listed("") == []
