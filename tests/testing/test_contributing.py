"""The method of CONTRIBUTING.md is complete: it registers, runs natively, keeps its errors."""

import re
from pathlib import Path

import pytest
import torch

import kvpact
from kvpact import CacheGeometry, create_cache
from kvpact.registry import unregister_method
from kvpact.testing import BackendContract, MethodContract, example_specs, random_tokens

TEXT = (Path(__file__).parents[2] / "CONTRIBUTING.md").read_text("utf-8")


@pytest.fixture(scope="module", autouse=True)
def sign():
    code = next(
        block for block in re.findall(r"```python\n(.*?)```", TEXT, re.S) if "Sign" in block
    )
    names = {"__name__": "contributing"}
    exec(compile(code, "CONTRIBUTING.md", "exec"), names)
    kvpact.register_method(names["Sign"])
    yield names["Sign"]
    unregister_method("sign")


class TestSign(MethodContract):
    spec = "sign"
    max_relative_error = 0.66


def test_it_is_in_the_table():
    assert example_specs()["sign"] == 0.66


def test_attention_over_it_is_native_and_right():
    from kvpact.kernels.cpu.backend import CPU

    if reason := CPU.runs_here(torch.device("cpu")):
        pytest.skip(reason)
    k, v = random_tokens(1, 2, 200, 64), random_tokens(1, 2, 200, 64, seed=1)
    one = [random_tokens(1, heads, 1, 64, seed=2 + heads) for heads in (2, 2, 4)]
    outputs = {}
    for backend in ("auto", "torch"):
        cache = create_cache("sign", CacheGeometry(1, 2, 64), backend=backend)
        cache.prefill(0, k, v)
        outputs[backend] = cache.attend(0, *one)
        assert set(cache.stats()["compute"]["attend"]) == {"cpu" if backend == "auto" else "torch"}
    torch.testing.assert_close(outputs["auto"], outputs["torch"], rtol=1e-5, atol=1e-6)


def test_the_contracts_that_it_names_are_there():
    import kvpact.testing

    named = set(re.findall(r"\b\w+Contract\b", TEXT))
    assert named <= set(kvpact.testing.__all__) and BackendContract.__name__ in named
