"""`all_finite` is what torch says, natively and without the kernels."""

import itertools

import pytest
import torch

from kvpact.kernels import all_finite
from kvpact.kernels.cpu.backend import CPU


@pytest.fixture(params=("native", "torch"))
def backend(request, monkeypatch):
    if request.param == "torch":
        monkeypatch.setattr(CPU, "runs_here", lambda device: "not built")
    elif CPU.runs_here(torch.device("cpu")):
        pytest.skip("the native kernels were not built")


@pytest.mark.parametrize("dtype", (torch.float32, torch.float16, torch.bfloat16))
def test_one_bad_number_is_found_wherever_it_is(backend, dtype):
    for shape in ((1, 1, 1, 1), (1, 3, 7, 5), (2, 2, 33, 80)):
        x = torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(dtype)
        # Tokens first in memory, as vLLM hands them over.
        x = x.transpose(1, 2).contiguous().transpose(1, 2)
        assert all_finite(x)
        x[0, 0, 0, 0] = torch.finfo(dtype).max
        assert all_finite(x)
        # Everywhere in the small ones; first, middle and last in the large one.
        places = set(itertools.product(*map(range, shape)))
        if len(places) > 200:
            places = {(0, 0, 0, 0), tuple(n // 2 for n in shape), tuple(n - 1 for n in shape)}
        for place, bad in itertools.product(places, (torch.nan, torch.inf, -torch.inf)):
            broken = x.clone(memory_format=torch.preserve_format)
            broken[place] = bad
            assert not all_finite(broken)
