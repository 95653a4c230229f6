"""The plain cache drops, clamps and doubles nothing (defects C1, C2, C3, C5)."""

import pytest
import torch

import kvpact
from kvpact.errors import CacheFull, GeometryError, IntegrityError

ROOM, WIDTH = 6, 4


def token(number: float, count: int = 1) -> torch.Tensor:
    return torch.full((count, WIDTH), float(number))


def cache_of(*numbers: float, layers: int = 2, dtype=torch.float32) -> kvpact.KVCache:
    cache = kvpact.KVCache(layers, ROOM, WIDTH, dtype)
    for number in numbers:
        for layer in range(layers):
            cache.store_kv(layer, token(number), token(-number))
        cache.advance()
    return cache


def shown(cache: kvpact.KVCache, layer: int = 0) -> list[float]:
    assert torch.equal(cache.get_keys(layer), -cache.get_values(layer))
    return cache.get_keys(layer)[:, 0].tolist()


def test_a_full_cache_refuses_and_does_not_drop():
    cache = cache_of(1, 2, 3, 4, 5, 6)
    with pytest.raises(CacheFull, match="0 of 6 free"):
        cache.store_kv(0, token(7), token(-7))
    assert shown(cache) == [1, 2, 3, 4, 5, 6]
    cache.truncate(4)
    with pytest.raises(CacheFull, match="2 of 6 free"):
        cache.store_kv(0, token(7, 3), token(-7, 3))
    assert shown(cache) == [1, 2, 3, 4]
    cache.store_kv(0, token(7, 2), token(-7, 2))
    assert shown(cache) == [1, 2, 3, 4, 7, 7]


@pytest.mark.parametrize("width", [0, 1, WIDTH - 1, WIDTH + 1, 2 * WIDTH])
def test_a_short_or_long_token_is_refused_and_not_cut(width):
    cache, wrong = cache_of(1), torch.ones(width)
    for pair in ((wrong, token(1)), (token(1), wrong), (wrong.numpy(), wrong.numpy())):
        with pytest.raises(GeometryError, match="shape"):
            cache.store_kv(1, *pair)
    assert shown(cache, 1) == [1]


def test_restores_refuse_what_is_too_long():
    long = kvpact.KVCache(2, ROOM + 1, WIDTH)
    for layer in range(2):
        long.store_kv(layer, token(9, ROOM + 1), token(-9, ROOM + 1))
    long.advance(ROOM + 1)
    cache = cache_of(1, 2)
    for call, given in (
        (cache.restore_from_snapshot, long.snapshot()),
        (cache.restore_from_payload, long.to_payload()),
    ):
        with pytest.raises(CacheFull, match="7 tokens"):
            call(given)
        assert shown(cache) == [1, 2]


def test_no_stale_row_is_ever_visible():
    held = cache_of(1, 2).snapshot()
    cache = cache_of(5, 6, 7)
    short = kvpact.KVSnapshot(held.keys, [held.values[0], held.values[1][:1]], 2)
    with pytest.raises(GeometryError, match="1 tokens, the snapshot 2"):
        cache.restore_from_snapshot(short)
    assert shown(cache) == shown(cache, 1) == [5, 6, 7]
    cache.restore_from_snapshot(held)
    assert shown(cache) == [1, 2]
    cache.store_kv(0, token(3), token(-3))
    assert shown(cache) == [1, 2, 3] and shown(cache, 1) == [1, 2]


def test_a_payload_is_checked_in_all_parts():
    cache, payload = cache_of(1), bytearray(cache_of(5, 6).to_payload())
    payload[-1] ^= 1  # a bit of the last value
    with pytest.raises(IntegrityError):
        cache.restore_from_payload(payload)
    assert shown(cache) == [1]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_16_bits_take_half_of_the_memory_and_none_is_taken_up_front(dtype):
    sizes = {}
    for kind in (torch.float32, dtype):
        cache = kvpact.KVCache(2, 1 << 16, 1024, kind)
        assert cache.memory_usage() == 0
        rows = torch.ones(64, 1024)
        for layer in range(2):
            cache.store_kv(layer, rows, rows)
        cache.advance(64)
        assert cache.get_keys(0).dtype == kind
        sizes[kind] = cache.memory_usage()
    assert sizes[torch.float32] == 4 * 64 * 4096
    assert sizes[dtype] == sizes[torch.float32] / 2


def test_a_rollback_leaves_no_token_twice():
    """Four drafted tokens, two accepted, one corrected: what stands is what was said."""
    cache = cache_of(1, 2)
    for layer in range(2):
        drafted = torch.cat([token(n) for n in (3, 4, 50, 60)])
        cache.store_kv(layer, drafted, -drafted)
    cache.advance(4)
    cache.truncate(4)
    for layer in range(2):
        cache.store_kv(layer, token(5), token(-5))
    cache.advance()
    assert shown(cache) == shown(cache, 1) == [1, 2, 3, 4, 5]
    cache.truncate(100)
    assert cache.seq_len == 5, "truncate extended"
