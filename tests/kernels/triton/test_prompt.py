"""Prompts that torch's flash attention computes, and those that it may not."""

import pytest
import torch

pytest.importorskip("triton")

from kvpact import AttendConfig
from kvpact.kernels.base import AttendCall
from kvpact.kernels.torch.attend import attend
from kvpact.kernels.triton.prompt import attend_prompt, is_plain_prompt


def call(dtype=torch.bfloat16, q_heads=6, dim=32, new=9, queries=9, padding=None, **rules):
    generator = torch.Generator().manual_seed(0)
    k, v = (torch.randn(2, 2, new, dim, generator=generator).to(dtype) for _ in range(2))
    q = torch.randn(2, q_heads, queries, dim, generator=generator).to(dtype)
    return AttendCall(None, k, v, q, AttendConfig(**rules), padding)


@pytest.mark.parametrize("rules", [{}, {"softmax_scale": 0.3}, {"is_causal": False}])
@pytest.mark.parametrize("q_heads", [2, 6])
def test_it_is_the_torch_body(q_heads, rules):
    given = call(q_heads=q_heads, **rules)
    assert is_plain_prompt(given)
    expected, found = attend(given).float(), attend_prompt(given).float()
    assert (found - expected).norm() <= 1e-2 * expected.norm()


@pytest.mark.parametrize(
    "options",
    [
        {"dtype": torch.float32},
        {"dim": 20},
        {"dim": 320},
        {"queries": 4},
        {"padding": torch.tensor([0, 3])},
        {"softcap": 2.0},
        {"sliding_window": 3},
        {"sink_logits": torch.zeros(6)},
        {"mask": torch.ones(1, 1, 9, 9, dtype=torch.bool)},
    ],
    ids=str,
)
def test_others_are_left_to_the_general_kernel(options):
    assert not is_plain_prompt(call(**options))
