"""Any head_dim is stored and attended (defect A5)."""

import pytest
from closeness import bound_of, error
from one_layer import METHODS, causal, fill, kvq, without_exact_tokens
from torch.nn.functional import scaled_dot_product_attention as sdpa

from kvpact.testing import example_specs

ERRORS = {**example_specs(), "turboquant:bits=3,mode=prod": 0.28}


@pytest.mark.parametrize("dim", [80, 96, 160, 192, 224, 288])
@pytest.mark.parametrize("spec", METHODS)
def test_any_head_dim(dim, spec):
    k, v, q = kvq(140, dim=dim)
    cache = fill(without_exact_tokens(spec), k[:, :, :-2], v[:, :, :-2])
    output = cache.fork().attend(0, k=k[:, :, -2:], v=v[:, :, -2:], q=q[:, :, -2:])
    result = cache.prefill(0, k[:, :, -2:], v[:, :, -2:])
    wanted = sdpa(q[:, :, -2:], result.k, result.v, causal(2, 140), enable_gqa=True)
    assert error(wanted, output) <= bound_of(spec)
    for stored, given in ((result.k, k), (result.v, v)):
        lost = ((stored - given).square().sum() / given.square().sum()).item()
        assert lost < ERRORS[spec] ** 2
        assert (lost > 0) == (spec != "none")
