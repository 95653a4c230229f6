"""Any head_dim is stored and attended (defect A5)."""

import pytest
import torch
from one_layer import METHODS, causal, fill, kvq
from torch.nn.functional import scaled_dot_product_attention as sdpa

ERRORS = {"kivi:bits=2": 0.2, "turboquant:bits=3,mode=prod": 0.08, "kvarn:bits=3": 0.055}


@pytest.mark.parametrize("dim", [80, 96, 160, 192, 224, 288])
@pytest.mark.parametrize("spec", METHODS)
def test_any_head_dim(dim, spec):
    k, v, q = kvq(140, dim=dim)
    cache = fill(spec + ",sinks=0,window=0" if ":" in spec else spec, k[:, :, :-2], v[:, :, :-2])
    output = cache.fork().attend(0, k[:, :, -2:], v[:, :, -2:], q[:, :, -2:])
    result = cache.prefill(0, k[:, :, -2:], v[:, :, -2:])
    wanted = sdpa(q[:, :, -2:], result.k, result.v, causal(2, 140), enable_gqa=True)
    torch.testing.assert_close(output, wanted, rtol=1e-4, atol=2e-6)
    for stored, given in ((result.k, k), (result.v, v)):
        error = ((stored - given).square().sum() / given.square().sum()).item()
        assert 0 < error < ERRORS.get(spec, 0.04)
