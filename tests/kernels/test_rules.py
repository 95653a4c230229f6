"""Windows, softcap, sinks, masks and padding hold over packed slots (defect A6)."""

import pytest
import torch
from closeness import bound_of, error
from one_layer import METHODS, causal, fill, kvq
from torch import Tensor

from kvpact import AttendConfig
from kvpact.testing import reference_attention
from kvpact.testing.data import by_name


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


@pytest.mark.parametrize("config", RULES.values(), ids=RULES)
def test_rules_are_honoured_on_packed_slots(config):
    k, v, q = kvq(203, batch=2)
    new = [x[:, :, 200:] for x in (k, v, q)]
    for spec in METHODS:
        cache = fill(spec, k[:, :, :200], v[:, :, :200], AttendConfig(padding=config.padding))
        output = cache.fork().attend(0, **by_name(*new), config=config)
        plain = cache.fork().attend(
            0, **by_name(*new), config=AttendConfig(padding=torch.tensor([0, 0]))
        )
        result = cache.prefill(0, *new[:2])
        wanted = reference_attention(new[2], result.k, result.v, config)
        assert error(wanted, output.double()) <= bound_of(spec), spec
        if config.padding is None:  # padding is the cache's from the first call on
            assert (output - plain).abs().max() > 1e-3
