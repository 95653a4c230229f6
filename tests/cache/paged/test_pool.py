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


@pytest.mark.parametrize("spec", ("int:bits=4", "kvarn:bits=3,group=32", "kivi:bits=2"))
def test_attention_reads_the_pages(spec, monkeypatch):
    """Nothing of the size of all tokens is decompressed on the way."""
    cache = PagedKVCache(spec, GEOMETRY, 64, backend="torch")
    seq = cache.allocate()
    for layer in range(2):
        cache.append(layer, {seq: kv(1500)})
    codec = type(cache._sequence(seq).layers[0].k.codec)
    decode, widest = codec.decode, []

    def counted(self, arrays):
        result = decode(self, arrays)
        widest.append(result.shape[2])
        return result

    monkeypatch.setattr(codec, "decode", counted)
    k, v = (x[None] for x in kv(1, 3))
    cache.view([seq]).decode(0, k, v, random_tokens(1, 4, 1, 64))
    assert widest
    assert max(widest) <= 512
