"""The Triton backend goes through the kit: on a GPU where there is one, otherwise interpreted."""

import subprocess
import sys

import pytest
import torch

pytest.importorskip("triton")

from kvpact import CacheGeometry, create_cache, parse_spec
from kvpact.errors import BackendUnavailable
from kvpact.kernels.triton.backend import TritonBackend
from kvpact.testing import BackendContract

CUDA = torch.cuda.is_available()


@pytest.mark.skipif(not CUDA, reason="the kit is run on a GPU, and interpreted with the slow tests")
class TestTriton(BackendContract):
    # Queries and weights are numbers of 14 bits where levels are whole ones.
    max_error = 5e-4
    device = "cuda"

    def make_backend(self):
        return TritonBackend()


@pytest.mark.slow
class TestInterpreted(BackendContract):
    max_error = 5e-4

    def make_backend(self):
        return TritonBackend(on_cpu=True)


def test_without_a_device_it_says_so():
    backend = TritonBackend()
    assert "CUDA devices, not on cpu" in backend.runs_here(torch.device("cpu"))
    if not CUDA:
        assert "no CUDA device" in backend.runs_here(torch.device("cuda"))
        with pytest.raises(BackendUnavailable, match="CUDA devices, not on cpu"):
            create_cache("int:bits=8", CacheGeometry(1, 2, 64), backend="triton")


def test_what_is_not_covered_has_a_reason():
    backend = TritonBackend(on_cpu=True)
    for spec in ("qjl", "polarquant", "turboquant:bits=3,mode=prod", "vq", "lowrank"):
        codec = parse_spec(spec).key.key_codec(64, torch.float32)
        for operation in ("attend", "encode", "decode"):
            assert backend.covers(operation, codec, torch.float32)
    codec = parse_spec("int:bits=8").key.key_codec(64, torch.float32)
    assert "float64" in backend.covers("attend", codec, torch.float64)
    assert "offset" in backend.covers_offset()


def test_kvpact_alone_does_not_import_triton():
    code = "import sys, kvpact, kvpact.kernels; print('triton' in sys.modules)"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "False"
