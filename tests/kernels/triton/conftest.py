"""The Triton backend wherever tests run: on a GPU, or interpreted on the CPU."""

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))


@pytest.fixture
def triton_backend(monkeypatch):
    """The backend, which caches made with ``backend="triton"`` have wherever this runs."""
    from kvpact.kernels import plan
    from kvpact.kernels.triton.backend import TritonBackend

    backend = TritonBackend(on_cpu=not torch.cuda.is_available())
    backends = [backend if one.name == "triton" else one for one in plan.BACKENDS]
    for name in ("choose", "plan"):
        monkeypatch.setattr(sys.modules[f"kvpact.kernels.{name}"], "BACKENDS", tuple(backends))
    return backend
