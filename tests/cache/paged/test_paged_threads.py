"""Layers of a paged cache in threads: the first makes the rows, who fails takes only its own."""

import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from tests.helpers.faults import disturbed, is_free, length_of

from kvpact import CacheGeometry, PagedKVCache
from kvpact.errors import CacheFull
from kvpact.testing import random_tokens

GEOMETRY = CacheGeometry(3, 2, 32)
PATIENCE = 60


def kv(tokens, seed=0, batch=2):
    return tuple(random_tokens(batch, 2, tokens, 32, seed=2 * seed + i) for i in range(2))


def row(tokens, seed=0):
    return tuple(x[0] for x in kv(tokens, seed, batch=1))


def meet_in(cache, name, monkeypatch, call):
    """Let `call` begin in another thread inside the first call of a method of the cache."""
    original, started = getattr(cache, name), []

    def method(*arguments, **options):
        if not started:
            thread = threading.Thread(target=call)
            started.append(thread)
            thread.start()
            # Where the other has to wait for this one, it is still waiting after that.
            thread.join(0.2)
        return original(*arguments, **options)

    monkeypatch.setattr(cache, name, method)
    return started


def test_first_tokens_of_two_layers_go_into_the_same_rows(monkeypatch):
    cache = PagedKVCache("int:bits=8", GEOMETRY, 16)
    view = cache.view()
    others = meet_in(cache, "allocate_rows", monkeypatch, lambda: view.prefill(1, *kv(5, 1)))
    view.prefill(0, *kv(5))
    others[0].join(PATIENCE)
    assert [view.seq_len(i) for i in range(3)] == [5, 5, 0]
    assert sorted(cache._sequences) == sorted(view.seqs)
    view.reset()
    assert cache.num_free_pages == 16


def test_failing_first_call_takes_no_other_layers_tokens(monkeypatch):
    cache = PagedKVCache("int:bits=8", GEOMETRY, 4)
    view = cache.view()
    others = meet_in(cache, "reserve", monkeypatch, lambda: view.prefill(0, *kv(5)))
    with pytest.raises(CacheFull):
        view.prefill(1, *kv(500, 1))
    others[0].join(PATIENCE)
    assert [view.seq_len(i) for i in range(3)] == [5, 0, 0]


def test_failing_first_calls_leave_no_rows(monkeypatch):
    cache = PagedKVCache("int:bits=8", GEOMETRY, 4)
    view = cache.view()
    failures = []

    def fail():
        with pytest.raises(CacheFull) as caught:
            view.prefill(0, *kv(500))
        failures.append(caught)

    others = meet_in(cache, "reserve", monkeypatch, fail)
    with pytest.raises(CacheFull):
        view.prefill(1, *kv(500, 1))
    others[0].join(PATIENCE)
    assert len(failures) == 1
    assert view.seqs is None
    assert not cache._sequences and cache.num_free_pages == 4


def test_failing_step_leaves_pages_that_another_layer_has_prepared():
    cache = PagedKVCache("int:bits=8,sinks=0,window=0", GEOMETRY, 8)
    seq = cache.allocate()
    inside, done = threading.Event(), threading.Event()

    def fail(_):
        inside.set()
        done.wait(PATIENCE)
        raise ValueError("the model failed")

    def failing():
        with pytest.raises(ValueError, match="the model failed"):
            cache.step(0, {seq: tuple(x[None] for x in row(40))}, before=fail)

    thread = threading.Thread(target=failing)

    def meanwhile(_):
        done.set()
        thread.join(PATIENCE)

    thread.start()
    inside.wait(PATIENCE)
    cache.step(1, {seq: tuple(x[None] for x in row(70))}, before=meanwhile)
    assert [cache.seq_len(seq, i) for i in range(3)] == [0, 70, 0]
    held = cache.layer_of(seq, 1).dequantize("k")
    assert (held[0] - row(70)[0]).norm() < 0.01 * held.norm()
    assert cache.num_free_pages == 8 - 70 // cache.pool.page_size - 1
    cache.truncate(seq, 0)
    assert cache.num_free_pages == 8


def test_many_threads_on_one_layer_lose_nothing():
    """Each token comes whole and once; its pages are counted when its turn comes."""
    cache = PagedKVCache("int:bits=8,sinks=2,window=8", GEOMETRY, 16)
    seq, start = cache.allocate(), threading.Barrier(6)

    def append(number):
        start.wait(PATIENCE)
        for i in range(20):
            k = torch.full((2, 1, 32), float(number * 20 + i + 1))
            cache.append(0, {seq: (k, -k)})

    with ThreadPoolExecutor(6) as pool:
        list(pool.map(append, range(6)))
    k = cache.layer_of(seq, 0).dequantize("k")
    assert sorted(round(x) for x in k[0, 0, :, 0].tolist()) == list(range(1, 121))


def test_the_locks_of_any_number_of_layers_are_taken_and_given_back():
    """As it was: a call of Python within a call for each layer, up to Python's limit."""
    cache = PagedKVCache("int:bits=8", CacheGeometry(sys.getrecursionlimit() + 10, 1, 8), 1)
    seq = cache.allocate()
    cache.free(cache.fork(seq))
    assert all(is_free(lock) for lock in (cache.layer_locks[0], cache.layer_locks[-1]))


def test_an_interrupt_anywhere_gives_the_locks_back():
    cache = PagedKVCache("int:bits=8", GEOMETRY, 4)
    seq = cache.allocate()
    for n in range(1, length_of(lambda: cache.truncate(seq, 0), "interrupt") + 1):
        assert disturbed(lambda: cache.truncate(seq, 0), "interrupt", n)
        assert all(is_free(lock) for lock in [*cache.layer_locks, cache.pool.lock])
    cache.append(0, {seq: row(5)})
