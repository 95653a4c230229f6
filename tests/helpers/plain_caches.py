"""Plain caches with random tokens, and what is to be the same after a refusal."""

import pytest
import torch

from kvpact import errors
from kvpact.cache import KVCache
from kvpact.testing.held import same_bytes

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
LAYERS, ROOM, WIDTH = 2, 8, 5


def rows(count: int, seed: int = 0, dtype: torch.dtype = torch.float32, width: int = WIDTH):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, width, generator=generator).to(dtype)


def filled(tokens: int, dtype: torch.dtype = torch.float32, room: int = ROOM) -> KVCache:
    """A cache whose layer l holds `rows` of seed l as K and of seed 10 + l as V, in fp32."""
    cache = KVCache(LAYERS, room, WIDTH, dtype)
    if tokens:
        for layer in range(LAYERS):
            cache.store_kv(layer, rows(tokens, layer), rows(tokens, 10 + layer))
        cache.advance(tokens)
    return cache


def state(cache: KVCache) -> list:
    shown = [(cache.get_keys(i).clone(), cache.get_values(i).clone()) for i in range(LAYERS)]
    return [cache.seq_len, shown, cache.memory_usage()]


def assert_same(a: list, b: list) -> None:
    assert a[0] == b[0] and a[2] == b[2]
    for left, right in zip(a[1], b[1], strict=True):
        assert all(map(same_bytes, left, right))


def assert_refused(cache, error, call, *args, match=None):
    before = state(cache)
    with pytest.raises(error, match=match) as caught:
        call(*args)
    assert isinstance(caught.value, errors.KVPactError)
    assert_same(before, state(cache))
