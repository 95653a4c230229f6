"""The bias of QJL is in units of the scaled logits, and exact tokens have none (defect A1)."""

import math

import pytest
import torch
from one_layer import causal, fill, kvq
from torch.nn.functional import scaled_dot_product_attention as sdpa

import kvpact
from kvpact import AttendConfig, CacheGeometry
from kvpact.testing.data import by_name


@pytest.mark.parametrize("scale", [None, 0.02, 0.3])
def test_bias_of_prod_is_in_units_of_the_scaled_logits(scale):
    k, v, q = kvq(105, dim=128)
    spec = "turboquant:bits=3,mode=prod,sinks=4,window=16"
    config = AttendConfig(softmax_scale=scale)
    new = [x[:, :, 100:] for x in (k, v, q)]
    cache = fill(spec, k[:, :, :100], v[:, :, :100])
    output = cache.fork().attend(0, **by_name(*new), config=config)
    whole_key = cache.fork().prefill(0, *new[:2], None, config).k  # without q, K holds it all
    result = cache.prefill(0, *new, config)
    used = scale if scale is not None else 128**-0.5
    missing = (whole_key - result.k).repeat_interleave(2, 1)
    assert result.logit_bias.shape == (1, 4, 5, 105)
    torch.testing.assert_close(result.logit_bias, used * new[2] @ missing.mT, rtol=1e-4, atol=2e-5)
    assert result.logit_bias[..., 4:64].abs().min() > 0  # two tiles have left the window
    exact = [*range(4), *range(84, 105)]  # sinks, window, the new tokens
    assert not result.logit_bias[..., exact].any()
    assert torch.equal(result.k[:, :, exact], k[:, :, exact])
    assert torch.equal(result.v[:, :, exact], v[:, :, exact])
    # Standard attention over what the result shows is what the cache computes by itself.
    bias = result.logit_bias.masked_fill(~causal(5, 105), -math.inf)
    # In fp64: torch's own fp32 is off by 2e-6 with the largest scale, by more on some processors.
    doubles = [x.double() for x in (new[2], result.k, result.v)]
    shown = sdpa(*doubles, bias.double(), scale=used, enable_gqa=True).float()
    torch.testing.assert_close(output, shown, rtol=1e-4, atol=2e-6)
    # The keys without their bias are another thing: the test can see it.
    unbiased = sdpa(*doubles, causal(5, 105), scale=used, enable_gqa=True)
    assert (unbiased - output).abs().max() > 1e-3


def test_the_first_prefill_is_exact_throughout():
    first = kvpact.create_cache("turboquant:bits=3,mode=prod", CacheGeometry(1, 2, 64))
    assert first.prefill(0, *kvq(105)).logit_bias is None
