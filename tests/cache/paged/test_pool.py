"""The pool of pages: slots are packed, and attention reads them where they lie."""

import pytest
import torch

from kvpact import CacheGeometry, PagedKVCache
from kvpact.cache import bytes_per_token
from kvpact.spec import parse_spec
from kvpact.testing import method_specs, random_tokens

GEOMETRY = CacheGeometry(2, 2, 64, dtype=torch.float32)
# Pages of 32 tokens, as the numbers below have it.
METHODS = [
    "kvarn:bits=3,group=32" if spec == "kvarn:bits=3" else spec
    for spec in method_specs(fitted=False)
    if spec != "none"
]


def kv(tokens, seed=0):
    return random_tokens(2, tokens, 64, seed=seed), random_tokens(2, tokens, 64, seed=seed + 99)


@pytest.mark.parametrize("spec", METHODS)
def test_pages_hold_packed_slots(spec):
    geometry = CacheGeometry(2, 2, 64, 128, torch.float32)
    pool = PagedKVCache(spec, geometry, 10).pool
    held = sum(tensor.numel() * tensor.element_size() for tensor in pool.tensors())
    slots = bytes_per_token(parse_spec(spec), geometry)
    assert held == 2 * 10 * pool.page_size * (slots["key_bytes"] + slots["value_bytes"])
    floats = 2 * 10 * pool.page_size * 2 * (64 + 128) * 4
    assert held < floats / (3.5 if spec == "fp8" else 6)
    assert not any(tensor.dtype == torch.float32 for tensor in pool.tensors())
