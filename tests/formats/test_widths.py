"""Codes take their own width, and V carries nothing that nobody reads (defect A4)."""

import pytest
import torch
from one_layer import fill, kvq

from kvpact.methods.turboquant import TurboQuant


@pytest.mark.parametrize("bits", range(1, 9))
def test_codes_take_their_own_width(bits):
    method = TurboQuant(bits=bits)
    for codec in (method.key_codec(128, torch.float32), method.value_codec(128, torch.float32)):
        codes = codec.fields[0]
        storage = codes.allocate(1, 1, 256, torch.device("cpu"))
        assert storage.numel() * storage.element_size() == 256 * 128 * bits // 8


def test_values_carry_no_signs():
    method = TurboQuant(bits=3, mode="prod")
    key, value = (c(128, torch.float32) for c in (method.key_codec, method.value_codec))
    assert [f.name for f in key.fields] == ["codes", "scale", "signs", "residual_norm"]
    assert [f.name for f in value.fields] == ["codes", "scale"]
    k, v, _ = kvq(128, dim=128)
    cache = fill("turboquant:bits=3,mode=prod,sinks=0,window=0", k, v)
    sizes = cache.stats()["bytes"]
    assert sizes["codes"] == 2 * 128 * (48 + 48)  # 2 + 1 bits of K, 3 of V
    assert sizes["side"] == 2 * 128 * (4 + 2)  # two fp16 numbers for K, one for V
    assert cache.memory_usage() == 2 * 128 * (52 + 50)
