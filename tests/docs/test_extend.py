"""What the pages on extending kvpact show is complete: it runs, and passes the contracts."""

import re

import pytest
import torch
from kvpact_pages.pages import DOCS

import kvpact.testing
from kvpact import CacheGeometry, create_cache, parse_spec, registry, testing
from kvpact.kernels.cpu.backend import CPU
from kvpact.testing.data import by_name


def shown(page: str, *names: str) -> dict:
    """Return what the Python blocks of a page define, up to the one with the last of `names`."""
    text = (DOCS / "extend" / page).read_text("utf-8")
    found = {"__name__": page}
    for block in re.findall(r"```python\n(.*?)```", text, re.DOTALL):
        if not set(names) <= found.keys():
            exec(compile(block, page, "exec"), found)
    return found


@pytest.fixture(scope="module", autouse=True)
def methods():
    yield shown("method.md", "Sign", "cache")
    registry._registered.pop("sign")
    registry._registered.pop("log")


class TestSign(testing.MethodContract):
    spec = "sign"
    max_relative_error = 0.66


class TestLog(testing.MethodContract):
    spec = "log:bits=4"
    max_relative_error = 0.24


class TestLogCache(testing.CacheContract):
    spec = "log:bits=4"


class Native(testing.BackendContract):
    def make_backend(self):
        return CPU


class Interpreted(testing.BackendContract):
    max_error = 5e-4

    def make_backend(self):
        from kvpact.kernels.triton.backend import TritonBackend

        return TritonBackend(on_cpu=True)


CONTRACTS = [Native, pytest.param(Interpreted, marks=pytest.mark.slow)]


@pytest.mark.parametrize("contract", [Native, Interpreted])
def test_native_kernels_cover_a_form(contract):
    codec = parse_spec("log:bits=4").key.key_codec(64, torch.float32)
    for operation in ("attend", "encode", "decode"):
        assert contract().make_backend().covers(operation, codec, torch.float32) == ""


@pytest.mark.parametrize("contract", CONTRACTS)
@pytest.mark.parametrize("spec", ["log:bits=4", "log:bits=2"])
def test_they_compute_what_torch_does(contract, spec):
    kit = contract()
    if reason := kit.make_backend().runs_here(torch.device("cpu")):
        pytest.skip(reason)
    kit.test_encoded_bytes(spec, "key")
    kit.test_decoded_numbers(spec, "value")
    kit.test_attention_over_every_method(spec)


def test_the_method_is_in_the_table():
    assert testing.example_specs()["sign"] == 0.66


def test_attention_over_it_is_native_and_right():
    if reason := CPU.runs_here(torch.device("cpu")):
        pytest.skip(reason)
    k, v = testing.random_tokens(1, 2, 200, 64), testing.random_tokens(1, 2, 200, 64, seed=1)
    one = [testing.random_tokens(1, heads, 1, 64, seed=2 + heads) for heads in (2, 2, 4)]
    outputs = {}
    for backend in ("auto", "torch"):
        cache = create_cache("sign", CacheGeometry(1, 2, 64), backend=backend)
        cache.prefill(0, k, v)
        outputs[backend] = cache.attend(0, **by_name(*one))
        assert set(cache.stats()["compute"]["attend"]) == {"cpu" if backend == "auto" else "torch"}
    torch.testing.assert_close(outputs["auto"], outputs["torch"], rtol=1e-5, atol=1e-6)


def test_the_engine_generates_what_it_does_without_a_cache():
    found = shown("engine.md", "whole_again")
    assert found["exact"].shape == found["close"].shape == (1, 16)


@pytest.mark.parametrize("spec", ["int:bits=4", "turboquant:bits=4"])
def test_the_backend_attends_as_torch_does(spec):
    shown("backend.md", "TestThreaded")["TestThreaded"]().test_attention_over_every_method(spec)


def test_the_backend_says_what_it_leaves_to_others():
    backend = shown("backend.md", "ThreadedBackend")["ThreadedBackend"]()
    assert "don't encode" in backend.covers("encode", None, torch.float32)
    assert "not for cuda" in backend.runs_here(torch.device("cuda"))


TestSqliteStore = shown("store.md", "TestSqliteStore")["TestSqliteStore"]
TestSqliteStore.examples, TestSqliteStore.steps = 2, 10


def test_the_contracts_that_are_named_are_there():
    text = "".join(path.read_text("utf-8") for path in (DOCS / "extend").glob("*.md"))
    named = set(re.findall(r"\b\w+Contract\b", text))
    assert {"MethodContract", "BackendContract", "StoreContract"} <= named
    assert named <= set(kvpact.testing.__all__)
