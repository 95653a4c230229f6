"""The Triton backend goes through the kit: on a GPU where there is one, otherwise interpreted."""

import pytest
import torch

pytest.importorskip("triton")

from kvpact import CacheGeometry, create_cache, parse_spec
from kvpact.errors import BackendUnavailable
from kvpact.kernels import coverage
from kvpact.kernels.torch.backend import TORCH
from kvpact.kernels.triton.backend import TritonBackend
from kvpact.kernels.triton.forms import on_device
from kvpact.testing import BackendContract

CUDA = torch.cuda.is_available()

if CUDA:  # without a GPU the kit is interpreted, with the slow tests

    class TestTriton(BackendContract):
        # Queries and weights are numbers of 14 bits where levels are whole ones.
        max_error = 5e-4
        device = "cuda"

        def make_backend(self):
            return TritonBackend()


@pytest.mark.slow
@pytest.mark.skipif(CUDA, reason="kernels are compiled here")
class TestInterpreted(BackendContract):
    max_error = 5e-4

    @pytest.fixture(autouse=True)
    def only_what_ends(self, request):
        if "encoded_bytes[trellis" in request.node.name:
            pytest.skip("too long a search to interpret: test_trellis_encode.py has shorter ones")

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
    for method in (parse_spec("trellis:bits=3").key, parse_spec("trellis:bits=2").value):
        codec = method.value_codec(5, torch.float32)
        for operation in ("attend", "encode", "decode"):
            refused = backend.covers(operation, codec, torch.float32)
            assert refused == "trellises of less than 8 channels"
    codec = parse_spec("int:bits=8").key.key_codec(64, torch.float32)
    assert "float64" in backend.covers("attend", codec, torch.float64)
    assert "offset" in backend.covers_offset()


@pytest.mark.parametrize(("spec", "reason"), (
    ("turboquant:bits=4", ""),
    ("trellis:bits=4", ""),
    ("fp8/turboquant:bits=4", "K has no levels of whole numbers"),
    ("turboquant:bits=6", "K has codes of 6 bits"),
    ("kivi:bits=4", "K has scales per channel"),
    ("turboquant:bits=4/kvarn:bits=4", "V has scales per channel"),
))  # fmt: skip
def test_where_the_general_kernel_attends_the_reason_is_told(monkeypatch, spec, reason):
    backend = TritonBackend()
    monkeypatch.setattr("kvpact.kernels.plan.BACKENDS", (backend, TORCH))
    monkeypatch.setattr(backend, "runs_here", lambda device: "")
    spec = parse_spec(spec)
    codecs = (make(128, torch.bfloat16) for make in (spec.key.key_codec, spec.value.value_codec))
    line = coverage(*codecs, torch.device("cuda"), torch.bfloat16)[0]
    assert line.reason == (reason and f"triton: the general kernel attends: {reason}")


def test_kernels_are_launched_on_the_device_of_the_tensors(monkeypatch):
    entered = []
    monkeypatch.setattr(torch.cuda, "device", entered.append)
    on_device(torch.device("cuda", 1))
    assert entered == [torch.device("cuda", 1)]
    with on_device(torch.device("cpu")):
        assert entered == [torch.device("cuda", 1)]
