"""The Triton backend wherever tests run: on a GPU, or interpreted on the CPU."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

CUDA = torch.cuda.is_available()
ON_DEVICES = (
    "test_ahead_of_time", "test_backend", "test_graphs", "test_long_pasts", "test_smollm2",
    "test_step", "test_taking", "test_vllm_pages",
)  # fmt: skip
"""Modules whose tensors lie on a GPU where there is one; those of the others are the CPU's."""


def pytest_collection_modifyitems(items):
    """Skip what only the interpreter can run where kernels are compiled."""
    skip = pytest.mark.skip(reason="interpreted where no GPU is seen: CUDA_VISIBLE_DEVICES=''")
    for item in items:
        if CUDA and item.path.parent == HERE and item.path.stem not in ON_DEVICES:
            item.add_marker(skip)


@pytest.fixture(scope="session", autouse=True)
def a_quicker_interpreter():
    """Triton's patches its language at each call, and asks for overflows that it tells nobody."""
    if CUDA:
        yield
        return
    from triton.runtime import interpreter

    patch, scopes, builder = interpreter._patch_lang, {}, interpreter.interpreter_builder

    def patch_once(fn):
        module = id(fn.__globals__)
        if module not in scopes:
            scopes[module] = patch(fn)  # and is never restored
        return type(scopes[module])()

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(interpreter, "_patch_lang", patch_once)
        if not builder.options.debug:
            patched.setattr(builder, "options", replace(builder.options, sanitize_overflow=False))
        yield


@pytest.fixture(autouse=True)
def segments_of_a_device(monkeypatch):
    """Segments as a GPU has them: of one size for K and V, from the first token on."""
    from kvpact import units

    monkeypatch.setattr(units, "FEW", -1)


@pytest.fixture
def triton_backend(monkeypatch):
    """The backend, which caches made with ``backend="triton"`` have wherever this runs."""
    from kvpact.kernels import plan
    from kvpact.kernels.triton.backend import TritonBackend

    backend = TritonBackend(on_cpu=not CUDA)
    backends = [backend if one.name == "triton" else one for one in plan.BACKENDS]
    for name in ("choose", "plan"):
        monkeypatch.setattr(sys.modules[f"kvpact.kernels.{name}"], "BACKENDS", tuple(backends))
    return backend
