"""Room that was made beforehand: steps allocate nothing, and store what they would store."""

import pytest
import torch
from one_layer import METHODS

from kvpact import CacheGeometry, create_cache
from kvpact.errors import CacheFull
from kvpact.testing.data import by_name

GEOMETRY = CacheGeometry(2, 2, 64, dtype=torch.float32)


def tokens(count, generator):
    k, v = (torch.randn(1, 2, count, 64, generator=generator) for _ in range(2))
    return k, v, torch.randn(1, 4, count, 64, generator=generator)


def where(cache):
    held = [stream for layer in cache._layers for stream in layer.streams()]
    parts = [(stream, part) for stream in held for part in stream.store.held_parts()]
    slots = [part[f.name].data_ptr() for stream, part in parts for f in stream.codec.fields]
    return slots, [stream.memory.tensor.data_ptr() for stream in held]


@pytest.mark.parametrize("backend", ["auto", "torch"])
@pytest.mark.parametrize("spec", METHODS)
def test_steps_stay_in_the_room_and_change_no_byte(spec, backend):
    generator = torch.Generator().manual_seed(5)
    cache, plain = (create_cache(spec, GEOMETRY, backend=backend) for _ in range(2))
    prompt = [tokens(150, generator) for _ in range(2)]
    for one in (cache, plain):
        for layer, given in enumerate(prompt):
            one.attend(layer, **by_name(*given))
    cache.reserve(75)
    assert cache.memory_usage() > plain.memory_usage()
    assert torch.equal(cache.dequantize(0, "k"), plain.dequantize(0, "k"))
    before = where(cache)
    for _ in range(15):
        for layer in range(2):
            given = tokens(5, generator)
            assert torch.equal(*(x.attend(layer, **by_name(*given)) for x in (cache, plain)))
    slots, tails = where(cache)
    assert slots == before[0]
    if ",window=0" not in spec:
        streams = [s for x in cache._layers for s in x.streams()]
        moved = zip(tails, before[1], streams, strict=True)
        assert all(now == then or not stream.window for now, then, stream in moved)
    for layer in range(2):
        for side in "kv":
            assert torch.equal(cache.dequantize(layer, side), plain.dequantize(layer, side))


def test_room_is_within_the_cache_and_may_be_none():
    cache = create_cache("int:bits=8", GEOMETRY, max_tokens=100)
    cache.reserve(50)
    assert cache.seq_len() == 0
    cache.attend(0, **by_name(*tokens(60, torch.Generator().manual_seed(1))))
    cache.reserve(40)
    with pytest.raises(CacheFull, match="reserve fewer"):
        cache.reserve(41)
    assert cache.seq_len() == 60
