"""Any head_dim is stored and attended (defect A5)."""

import pytest
import torch
from one_layer import METHODS, causal, fill, kvq, without_exact_tokens
from torch.nn.functional import scaled_dot_product_attention as sdpa

from kvpact.testing import example_specs

ERRORS = {**example_specs(), "turboquant:bits=3,mode=prod": 0.28}


@pytest.mark.parametrize("dim", [80, 96, 160, 192, 224, 288])
@pytest.mark.parametrize("spec", METHODS)
def test_any_head_dim(dim, spec):
    k, v, q = kvq(140, dim=dim)
    cache = fill(without_exact_tokens(spec), k[:, :, :-2], v[:, :, :-2])
    output = cache.fork().attend(0, k[:, :, -2:], v[:, :, -2:], q[:, :, -2:])
    result = cache.prefill(0, k[:, :, -2:], v[:, :, -2:])
    wanted = sdpa(q[:, :, -2:], result.k, result.v, causal(2, 140), enable_gqa=True)
    torch.testing.assert_close(output, wanted, rtol=1e-4, atol=2e-6)
    for stored, given in ((result.k, k), (result.v, v)):
        error = ((stored - given).square().sum() / given.square().sum()).item()
        assert error < ERRORS[spec] ** 2
        assert (error > 0) == (spec != "none")
