"""What one call allocates beyond the cache: bounded, and the same for long caches as for short."""

import ctypes
import threading
import weakref

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import kvpact
from kvpact.kernels.cpu.library import _load
from kvpact.testing import random_tokens
from kvpact.testing.data import by_name

NATIVE = _load()
BACKENDS = [
    "torch",
    pytest.param("auto", marks=pytest.mark.skipif(isinstance(NATIVE, str), reason=str(NATIVE))),
]

HEADS, QUERY_HEADS, DIM = 3, 9, 64  # SmolLM2-135M
SPECS = [
    "turboquant:bits=4", "turboquant:bits=3,center=64", "turboquant:bits=3,mode=prod",
    "kivi:bits=2", "kvarn:bits=3", "int:bits=8", "none",
]  # fmt: skip


class Allocations(TorchDispatchMode):
    """Follows the life of every storage that comes up while the mode is on, and the scratch."""

    def __init__(self):
        super().__init__()
        self.live = self.peak = self.largest = self.scratch = 0
        self.known = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        # What goes in was there before, unless this mode saw it come up.
        before = {
            x.untyped_storage()._cdata for x in tree_leaves((args, kwargs)) if torch.is_tensor(x)
        }
        result = func(*args, **(kwargs or {}))
        for x in tree_leaves(result):
            if torch.is_tensor(x):
                self._see(x.untyped_storage(), before)
        return result

    def _see(self, storage, before):
        key = storage._cdata
        if key in self.known or key in before:
            return
        size = storage.nbytes()
        self.known.add(key)
        self.live += size
        self.peak, self.largest = max(self.peak, self.live), max(self.largest, size)
        weakref.finalize(storage, self._forget, key, size)

    def _forget(self, key, size):
        self.known.discard(key)
        self.live -= size


def tokens(count, seed=0):
    k, v = (random_tokens(1, HEADS, count, DIM, seed=seed + i) for i in range(2))
    return k, v, random_tokens(1, QUERY_HEADS, count, DIM, seed=seed + 2)


def filled(spec, count, **options):
    cache = kvpact.create_cache(spec, kvpact.CacheGeometry(1, HEADS, DIM), **options)
    cache.prefill(0, *tokens(count))
    return cache


def measured(call):
    """Call in a thread of its own, which has no native scratch memory yet."""
    allocations, threads = Allocations(), torch.get_num_threads()

    def run():
        torch.set_num_threads(1)  # so that no other thread computes
        with allocations:
            call()
        if not isinstance(NATIVE, str):
            everyone = ctypes.c_int64()
            allocations.scratch = NATIVE.loaded.kvp_scratch(ctypes.byref(everyone))
            assert everyone.value >= allocations.scratch

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    torch.set_num_threads(threads)
    return allocations


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("spec", SPECS)
def test_a_decode_call_allocates_little_and_no_more_for_a_long_cache(spec, backend):
    peaks = {}
    for held in (1024, 8192):
        cache = filled(spec, held, backend=backend)
        cache.decode(0, *tokens(1, 5), kvpact.AttendConfig())  # tables are made once
        peaks[held] = measured(lambda c=cache: c.decode(0, *tokens(1, 9), kvpact.AttendConfig()))
        assert peaks[held].peak + peaks[held].scratch <= 4 * 2**20
        # No tensor holds a number per token and channel, nor every score.
        assert 0 < peaks[held].largest < held * DIM * 4
    assert abs(peaks[8192].peak - peaks[1024].peak) <= 64 * 2**10
    assert abs(peaks[8192].scratch - peaks[1024].scratch) <= 64 * 2**10
    assert peaks[8192].largest < 8192 * QUERY_HEADS * 4


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("spec", ["turboquant:bits=4", "kivi:bits=2"])
def test_a_chunk_allocates_no_more_for_a_long_cache(spec, backend):
    peaks = []
    for held in (2048, 8192):
        cache = filled(spec, held, backend=backend)
        cache.attend(0, **by_name(*tokens(256, 5)))
        allocations = measured(lambda c=cache: c.attend(0, **by_name(*tokens(256, 9))))
        peaks.append(allocations)
        # One tile of scores, [9 heads, 256 queries, 256 tokens] fp32, is the largest there is.
        assert 0 < allocations.largest <= 4 * QUERY_HEADS * 256 * 256
    assert abs(peaks[1].peak - peaks[0].peak) <= 64 * 2**10
    assert abs(peaks[1].scratch - peaks[0].scratch) <= 64 * 2**10


def test_growing_never_copies_the_whole():
    """Appending allocates a segment now and then, whatever is held."""
    cache = filled("turboquant:bits=4", 16384)
    whole = cache.memory_usage()
    for seed in range(130):
        new = tokens(1, seed)
        allocations = measured(lambda x=new: cache.prefill(0, *x))
        assert allocations.peak < whole / 8
    fork = measured(cache.fork)
    assert fork.peak == 0


def test_reading_tiles_never_makes_the_whole():
    cache = filled("turboquant:bits=4", 8192)
    result = cache.prefill(0, *tokens(1, 1))

    def read():
        for tile in result.tiles():
            assert tile.end - tile.start <= 256

    assert measured(read).peak <= 4 * 2**20
