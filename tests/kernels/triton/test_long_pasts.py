"""Decode steps over pasts that the fast kernels attend: on a device, or one of them interpreted."""

import pytest
import torch

pytest.importorskip("triton")

from kvpact import CacheGeometry, create_cache
from kvpact.kernels.triton.attend import attend
from kvpact.testing.data import by_name

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
SPECS = (
    "turboquant:bits=4", "turboquant:bits=3", "turboquant:bits=2",
    "turboquant:bits=4/turboquant:bits=2", "int:bits=8", "int:bits=4",
    "trellis:bits=4,first=false,weights=false,blocks=false",
)  # fmt: skip
DIMS = {"turboquant:bits=4": (64, 128, 256)}
DTYPES = {torch.float32: 5e-4, torch.float16: 1e-3, torch.bfloat16: 5e-3}


CASES = [(s, dim, dtype) for s in SPECS for dim in DIMS.get(s, (128,)) for dtype in DTYPES]


@pytest.mark.slow
@pytest.mark.parametrize(("spec", "dim", "dtype"), CASES if CUDA else CASES[:1])
def test_steps_over_long_pasts(spec, dim, dtype, triton_backend, monkeypatch):
    attended = []
    fast = attend.attend_fast
    monkeypatch.setattr(attend, "attend_fast", lambda *a: attended.append(a[0].parts) or fast(*a))
    generator = torch.Generator().manual_seed(0)

    def tokens(heads, count):
        return torch.randn(2, heads, count, dim, generator=generator).to(DEVICE, dtype)

    count = 3000 if DEVICE == "cuda" else 420
    past, step = (tokens(2, count), tokens(2, count)), (tokens(2, 1), tokens(2, 1), tokens(8, 1))
    outputs = []
    for backend in ("torch", "triton"):
        cache = create_cache(spec, CacheGeometry(1, 2, dim, dtype=dtype), backend=backend)
        cache.store(0, **by_name(*past))
        outputs.append(cache.attend(0, **by_name(*step)).float())
    assert len(attended) == 1 and attended[0] > 1
    assert (outputs[1] - outputs[0]).norm() <= DTYPES[dtype] * outputs[0].norm()
