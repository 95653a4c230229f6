"""`KVCache`: what it holds, shows, refuses and claims."""

import gc
import mmap
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from plain_caches import LAYERS, ROOM, WIDTH, assert_refused, filled, rows

from kvpact import errors
from kvpact.cache import KVCache


def test_part_of_what_is_in_flight_may_be_committed():
    cache = filled(1)
    for layer in range(LAYERS):
        cache.store_kv(layer, rows(4, layer), rows(4, layer))
    cache.advance(2)
    assert cache.seq_len == 3 and len(cache.get_keys(0)) == 5
    cache.store_kv(0, rows(1, 9), rows(1, 9))
    assert torch.equal(cache.get_keys(0)[1:], torch.cat([rows(4, 0)[:2], rows(1, 9)]))
    cache.advance()
    assert cache.seq_len == 4 and torch.equal(cache.get_keys(1)[1:], rows(4, 1))


def test_advance_wants_the_token_in_every_layer():
    cache = filled(2)
    assert_refused(cache, errors.IncompleteToken, cache.advance, match="layer 0")
    cache.store_kv(0, rows(1), rows(1))
    assert_refused(cache, errors.IncompleteToken, cache.advance, match="layer 1")
    cache.store_kv(1, rows(1), rows(1))
    assert_refused(cache, errors.IncompleteToken, cache.advance, 2, match="1 of 2")
    cache.advance()
    assert cache.seq_len == 3


def test_views_share_memory_and_stay_valid():
    cache = filled(2)
    k, first = cache.get_keys(0), cache.get_keys(0).data_ptr()
    shown = k.clone()
    for seed in range(5):
        for layer in range(LAYERS):
            cache.store_kv(layer, rows(1, seed), rows(1, seed))
        cache.advance()
    assert cache.get_keys(0).data_ptr() == first and torch.equal(k, shown)
    assert all(row.data_ptr() == first + 20 * i for i, row in cache.for_each_key(0))
    cache.clear()
    gc.collect()
    assert torch.equal(k, shown), "clear took the memory away under a view"
    assert cache.seq_len == 0 and len(cache.get_keys(0)) == 0
    payload = filled(3).to_payload()
    k = cache.get_keys(0)
    cache.restore_from_payload(payload)
    assert len(k) == 0 and len(cache.get_keys(0)) == 3


def _put(number):
    x = rows(1)
    x[0, 2] = number
    return x


WRONG = {
    "wide": (lambda: (rows(1, width=6), rows(1)), errors.GeometryError),
    "narrow": (lambda: (rows(1), rows(1, width=4)), errors.GeometryError),
    "rank 0": (lambda: (rows(1)[0, 0], rows(1)), errors.GeometryError),
    "rank 3": (lambda: (rows(1)[None], rows(1)), errors.GeometryError),
    "none": (lambda: (rows(0), rows(0)), errors.GeometryError),
    "unlike": (lambda: (rows(2), rows(1)), errors.GeometryError),
    "fp64": (lambda: (rows(1).double(), rows(1)), errors.DtypeError),
    "integers": (lambda: (rows(1), rows(1).int()), errors.DtypeError),
    "numpy fp64": (lambda: (np.zeros(5), rows(1)), errors.DtypeError),
    "byte order": (lambda: (np.zeros(5, ">f4"), rows(1)), errors.DtypeError),
    "list": (lambda: ([0.0] * 5, rows(1)), errors.DtypeError),
    "nothing": (lambda: (rows(1), None), errors.DtypeError),
    "meta": (lambda: (rows(1).to("meta"), rows(1)), errors.DeviceError),
    "NaN": (lambda: (_put(torch.nan), rows(1)), errors.NonFiniteError),
    "infinity": (lambda: (rows(1), _put(-torch.inf).numpy()), errors.NonFiniteError),
    "beyond fp16": (lambda: (rows(1), _put(7e4)), errors.NonFiniteError),
    "full": (lambda: (rows(6), rows(6)), errors.CacheFull),
}


@pytest.mark.parametrize(("make", "error"), WRONG.values(), ids=WRONG)
def test_wrong_tokens_change_nothing(make, error):
    cache = filled(3, torch.float16)
    cache.store_kv(0, rows(2, 3), rows(2, 4))
    for layer in range(LAYERS):
        assert_refused(cache, error, cache.store_kv, layer, *make())


@pytest.mark.parametrize("layer", [-1, 2, 1.0, None, True])
def test_wrong_layers(layer):
    cache = filled(1)
    for call in (cache.get_keys, cache.get_values, cache.for_each_key, cache.for_each_value):
        assert_refused(cache, errors.LayerIndexError, call, layer)
    assert_refused(cache, errors.LayerIndexError, cache.store_kv, layer, rows(1), rows(1))


@pytest.mark.parametrize("number", [-1, 1.0, None, True, "2"])
def test_wrong_numbers(number):
    cache = filled(2)
    assert_refused(cache, errors.GeometryError, cache.truncate, number)
    assert_refused(cache, errors.GeometryError, cache.advance, number)
    assert_refused(cache, errors.GeometryError, cache.advance, 0)
    for place in range(3):
        sizes = [LAYERS, ROOM, WIDTH]
        sizes[place] = number
        with pytest.raises(errors.GeometryError):
            KVCache(*sizes)
    with pytest.raises(errors.GeometryError):
        KVCache(LAYERS, 0, WIDTH)


def test_dtypes_by_name_and_of_numpy():
    given = ["float16", np.float16, np.dtype("float16"), torch.float16]
    assert [KVCache(1, 1, 1, dtype).dtype for dtype in given] == [torch.float16] * 4
    for wrong in ("float64", "int8", np.float64, torch.float64, int, 5, None, "nonsense"):
        with pytest.raises(errors.DtypeError):
            KVCache(1, 1, 1, wrong)


def test_more_than_there_are_addresses_for_is_refused():
    with pytest.raises(errors.CacheFull, match="can't reserve"):
        KVCache(1 << 20, 1 << 30, 1 << 20)


def test_a_cache_takes_rows_of_its_own():
    cache = filled(4)
    k, v = cache.get_keys(0).clone(), cache.get_values(0).clone()
    cache.truncate(1)
    cache.store_kv(0, v_view := cache._data[0, 1, 0:4], cache._data[0, 0, 0:4])
    assert len(v_view) == 4
    assert torch.equal(cache.get_keys(0)[1:], v) and torch.equal(cache.get_values(0)[1:], k)


def resident() -> int:
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * mmap.PAGESIZE


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_memory_is_claimed_as_it_is_used():
    """Room for 32 GiB; tokens of 26 MB."""
    gc.collect()
    before, token = resident(), torch.ones(100, 1024)
    cache = KVCache(32, 131_072, 1024)
    assert cache.memory_usage() == 0
    assert resident() - before < 4e6
    for layer in range(32):
        cache.store_kv(layer, token, token)
    cache.advance(100)
    held = 32 * 2 * 100 * 1024 * 4
    assert held <= cache.memory_usage() <= held + 128 * mmap.PAGESIZE
    assert held <= resident() - before < held + 8e6
    cache.truncate(0)
    assert cache.memory_usage() >= held, "truncated tokens are claimed still"
    cache.clear()
    gc.collect()
    assert cache.memory_usage() == 0
    assert resident() - before < 8e6


def test_neighbours_share_a_page_and_it_is_counted_once():
    assert filled(ROOM).memory_usage() == mmap.PAGESIZE  # 2 layers x 2 x 8 x 20 bytes


def test_layers_may_be_used_by_threads_of_their_own():
    """Eight layers, a thread each: every one stores and reads its tokens; then all advance."""
    layers, tokens = 8, 60
    cache = KVCache(layers, tokens, WIDTH)
    barrier = threading.Barrier(layers, action=None)
    last = threading.Barrier(layers, action=cache.advance)

    def run(layer: int) -> None:
        try:
            given = rows(tokens, layer)
            for position in range(tokens):
                barrier.wait(20)
                cache.store_kv(layer, given[position], -given[position])
                k, v = cache.get_keys(layer), cache.get_values(layer)
                assert torch.equal(k, given[: position + 1]) and torch.equal(v, -k)
                last.wait(20)
        except BaseException:
            barrier.abort()
            last.abort()
            raise

    with ThreadPoolExecutor(layers) as pool:
        list(pool.map(run, range(layers)))
    assert cache.seq_len == tokens
