"""Windows, softcap, sinks, masks and padding hold over packed slots (defect A6)."""

import math

import pytest
import torch
from one_layer import METHODS, causal, fill, kvq
from torch import Tensor

from kvpact import AttendConfig


def mask_of_a_tree(queries: int, total: int) -> Tensor:
    mask = causal(queries, total)[None, None].clone()
    mask[..., -2, -3] = False  # two drafts that don't see each other
    return mask


RULES = {
    "sliding window": AttendConfig(sliding_window=90),
    "softcap": AttendConfig(softcap=1.5),
    "sink logits": AttendConfig(sink_logits=torch.tensor([0.0, 1.0, 2.0, 6.0])),
    "boolean mask": AttendConfig(mask=mask_of_a_tree(3, 203), is_causal=False),
    "additive mask": AttendConfig(mask=torch.linspace(-3, 0, 203).expand(2, 4, 3, 203)),
    "padding": AttendConfig(padding=torch.tensor([0, 70])),
    "softmax scale": AttendConfig(softmax_scale=0.4),
}


def explicit(q: Tensor, k: Tensor, v: Tensor, config: AttendConfig) -> Tensor:
    k, v = k.repeat_interleave(2, 1), v.repeat_interleave(2, 1)
    logits = q @ k.mT * (config.softmax_scale or q.shape[-1] ** -0.5)
    if config.softcap:
        logits = config.softcap * torch.tanh(logits / config.softcap)
    seen = causal(q.shape[2], k.shape[2])[None, None]
    if config.sliding_window:
        seen = seen & (torch.arange(203) > torch.arange(200, 203)[:, None] - config.sliding_window)
    if config.padding is not None:
        seen = seen & (torch.arange(k.shape[2]) >= config.padding[:, None, None, None])
    if config.mask is not None and config.mask.dtype == torch.bool:
        seen = seen & config.mask
    elif config.mask is not None:
        logits = logits + config.mask
    logits = logits.masked_fill(~seen, -math.inf)
    if config.sink_logits is not None:
        sinks = config.sink_logits.view(1, 4, 1, 1).expand(*logits.shape[:3], 1)
        return torch.cat([logits, sinks], -1).softmax(-1)[..., :-1] @ v
    return logits.softmax(-1) @ v


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("spec", METHODS)
def test_rules_are_honoured_on_packed_slots(rule, spec):
    config = RULES[rule]
    k, v, q = kvq(203, batch=2)
    new = [x[:, :, 200:] for x in (k, v, q)]
    cache = fill(spec, k[:, :, :200], v[:, :, :200], AttendConfig(padding=config.padding))
    output = cache.fork().attend(0, *new, config)
    plain = cache.fork().attend(0, *new, AttendConfig(padding=torch.tensor([0, 0])))
    result = cache.prefill(0, *new[:2])
    wanted = explicit(new[2], result.k, result.v, config)
    torch.testing.assert_close(output, wanted, rtol=1e-4, atol=2e-6)
    if rule != "padding":  # padding is the cache's from the first call on
        assert (output - plain).abs().max() > 1e-3
