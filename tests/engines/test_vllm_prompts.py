"""Prompts by vLLM's own kernel beside those by kvpact's: no engine is started."""

import pytest
import torch
from vllm_pages import both_ways

from kvpact.contract import AttendConfig
from kvpact.integrations.pages.prompt import FEW, Scratch

SPECS = ("none:sinks=0,window=0", "turboquant:bits=4,sinks=0", "int:bits=8,sinks=0,window=5")
# Query heads, KV heads, width.
SHAPES = ((4, 2, 64), (3, 1, 32), (7, 1, 128), (2, 2, 256), (8, 2, 96), (32, 8, 64))
CONFIGS = (AttendConfig(softmax_scale=0.125), AttendConfig(softmax_scale=0.1, softcap=2.0))
BATCHES = (
    [(0, 1101)], [(0, 1), (1, FEW + 1)], [(1, 1), (0, 70), (2, 17)], [(2, FEW), (1, 95), (0, 51)],
)  # fmt: skip


@pytest.fixture(scope="module")
def own_kernel():
    """The module, or a skip where vLLM has no kernel that multiplies in AMX."""
    from vllm.platforms import current_platform

    from kvpact.integrations.vllm import cpu_attention as own_kernel

    current_platform.import_kernels()
    if own_kernel.why_not(64, 64, torch.bfloat16):
        pytest.skip("no AMX here")
    return own_kernel


@pytest.mark.parametrize("config", CONFIGS, ids=["plain", "softcap"])
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: "x".join(map(str, shape)))
@pytest.mark.parametrize("text", SPECS)
def test_vllms_kernel_gives_what_packed_slots_give(own_kernel, text, shape, config):
    dtype = torch.bfloat16
    scratch = Scratch(own_kernel.OwnKernel(*shape, dtype), *shape[1:], dtype, 1300)
    for x in scratch.pages:
        x.fill_(torch.nan)
    for out, right in both_ways(text, scratch, shape, dtype, config, BATCHES):
        torch.testing.assert_close(out, right, atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize(("given", "reason"), [
    ((64, 32, torch.bfloat16), "keys of width 64 and values of width 32"),
    ((72, 72, torch.bfloat16), "heads of width 72"),
    ((64, 64, torch.float32), "torch.float32 here"),
    ((80, 80, torch.bfloat16), "is no faster"),
], ids=["unlike", "width", "fp32", "vec16"])  # fmt: skip
def test_what_vllms_kernel_does_not_take_is_named(own_kernel, given, reason):
    assert reason in own_kernel.why_not(*given)
