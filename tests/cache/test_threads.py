"""One lock per layer, none held while another is taken (in a paged cache: taken in one order)."""

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from types import SimpleNamespace
from typing import ClassVar

import pytest
import torch

import kvpact
from kvpact import registry
from kvpact.cache.layer import layer as layer_module
from kvpact.cache.paged import locks as sequence_pages
from kvpact.cache.paged import pool as pages
from kvpact.errors import StaleResult
from kvpact.methods.none import Exact, ExactCodec
from kvpact.testing import random_tokens
from kvpact.testing.data import by_name

PATIENCE = 60
HEADS, DIM = 1, 4


def geometry(layers=1):
    return kvpact.CacheGeometry(layers, HEADS, DIM)


def tokens(count, seed=0, batch=1):
    return tuple(random_tokens(batch, HEADS, count, DIM, seed=seed * 3 + i) for i in range(3))


class MeetingCodec(ExactCodec):
    """Waits inside `encode` and `decode` for another thread that is in there too."""

    barrier: ClassVar[threading.Barrier | None] = None
    reading: ClassVar[threading.Barrier | None] = None

    def encode(self, x, frozen=None):
        if self.barrier is not None:
            MeetingCodec.barrier.wait(PATIENCE)
        return super().encode(x, frozen)

    def decode(self, arrays):
        if self.reading is not None:
            MeetingCodec.reading.wait(PATIENCE)
        return super().decode(arrays)


@dataclass(frozen=True, kw_only=True)
class Meeting(Exact):
    name: ClassVar[str] = "test_meeting"

    def key_codec(self, dim, dtype):
        return MeetingCodec(dim, dtype)


@pytest.fixture
def meeting(monkeypatch):
    kvpact.register_method(Meeting)
    monkeypatch.setattr(MeetingCodec, "barrier", None)
    monkeypatch.setattr(MeetingCodec, "reading", None)
    yield MeetingCodec
    registry._registered.pop("test_meeting")


def run_all(*calls):
    """Run calls at the same time; raise what they raise."""
    with ThreadPoolExecutor(len(calls)) as pool:
        return [future.result(PATIENCE) for future in [pool.submit(call) for call in calls]]


@pytest.mark.parametrize("how", ["attend", "prefill"])
def test_two_layers_store_at_the_same_time(meeting, how):
    cache = kvpact.create_cache("test_meeting/none", geometry(2))
    # Both threads have to be inside `encode` at once, or the barrier breaks.
    meeting.barrier = threading.Barrier(2)
    run_all(*(lambda i=i: getattr(cache, how)(i, **by_name(*tokens(5, i))) for i in range(2)))
    assert [cache.seq_len(i) for i in range(2)] == [5, 5]


def test_two_layers_attend_at_the_same_time(meeting):
    cache = kvpact.create_cache("test_meeting/none", geometry(2))
    for i in range(2):
        cache.prefill(i, *tokens(5, i))
    meeting.reading = threading.Barrier(2)
    config = kvpact.AttendConfig()
    run_all(*(lambda i=i: cache.decode(i, *tokens(1, i), config) for i in range(2)))
    assert [cache.seq_len(i) for i in range(2)] == [6, 6]


def test_one_layer_takes_turns(meeting):
    """The counterpart: in one layer two threads never meet inside `encode`."""
    cache = kvpact.create_cache("test_meeting/none", geometry())
    inside, most = [0], [0]
    guard = threading.Lock()

    class Counting:
        def wait(self, _):
            with guard:
                inside[0] += 1
                most[0] = max(most[0], inside[0])
            for _ in range(1000):
                torch.zeros(1)
            with guard:
                inside[0] -= 1

    meeting.barrier = Counting()
    run_all(*(lambda i=i: cache.attend(0, **by_name(*tokens(1, i))) for i in range(4)))
    assert most == [1]
    assert cache.seq_len() == 4


@pytest.mark.parametrize(
    "spec", ["none", "int:bits=8,sinks=2,window=9", "kivi:bits=8,sinks=0,window=0"]
)
def test_many_threads_on_one_layer_lose_nothing(spec):
    """Each token comes whole and once, whatever the order."""
    threads, each = 8, 24
    cache = kvpact.create_cache(spec, geometry())
    start = threading.Barrier(threads)

    def append(number):
        start.wait(PATIENCE)
        for i in range(each):
            value = float(number * each + i + 1)
            k = torch.full((1, HEADS, 1, DIM), value)
            if i % 3 == 0:
                cache.attend(0, k=k, v=-k, q=torch.zeros_like(k))
            else:
                cache.prefill(0, k, -k, torch.zeros_like(k))
            assert 0 < cache.seq_len() <= threads * each

    run_all(*(lambda n=n: append(n) for n in range(threads)))
    assert cache.seq_len() == threads * each
    k, v = cache.dequantize(0, "k"), cache.dequantize(0, "v")
    # Constant vectors of up to 192: 8 bits of a range are within 0.5 of the integer.
    found = sorted(round(x) for x in k[0, 0, :, 0].tolist())
    assert found == list(range(1, threads * each + 1))
    assert torch.equal(k.round(), -v.round())
    assert torch.equal(k.round(), k[..., :1].round().expand_as(k))


def test_operations_on_the_whole_cache_meet_appends():
    """Forks, selections, counts and rollbacks while all layers grow: no deadlock, no corruption."""
    layers, steps = 3, 60
    cache = kvpact.create_cache("turboquant:bits=4,window=8", geometry(layers))
    for i in range(layers):
        cache.prefill(i, *tokens(40, i, batch=2))
    start = threading.Barrier(layers + 3)

    def append(i):
        start.wait(PATIENCE)
        for step in range(steps):
            cache.attend(i, **by_name(*tokens(1, step, batch=2)))

    def forks():
        start.wait(PATIENCE)
        for step in range(steps):
            other = cache.fork()
            held = [other.seq_len(i) for i in range(layers)]
            other.attend(0, **by_name(*tokens(1, step, batch=2)))
            other.reorder(torch.tensor([1, 0]))
            other.truncate(20)
            assert min(held) >= 40

    def counts():
        start.wait(PATIENCE)
        for _ in range(steps):
            assert cache.memory_usage() > 0 and cache.stats()["tokens"] >= 40

    def reads():
        start.wait(PATIENCE)
        for step in range(steps):
            try:
                result = cache.fork().prefill(1, *tokens(1, step, batch=2))
                assert torch.isfinite(result.k).all()
            except StaleResult:
                pytest.fail("nobody rolled back")

    run_all(*(lambda i=i: append(i) for i in range(layers)), forks, counts, reads)
    assert [cache.seq_len(i) for i in range(layers)] == [40 + steps] * layers
    single = kvpact.create_cache("turboquant:bits=4,window=8", geometry(layers))
    for i in range(layers):
        single.prefill(i, *tokens(40, i, batch=2))
        for step in range(steps):
            single.prefill(i, *tokens(1, step, batch=2))
        for side in "kv":
            assert torch.equal(single.dequantize(i, side), cache.dequantize(i, side))


class WatchedLock:
    """An RLock that knows which locks its thread holds."""

    held: ClassVar[threading.local] = threading.local()
    most: ClassVar[list[int]] = []
    taken: ClassVar[list[int]] = []

    def __init__(self):
        self._lock = threading.RLock()

    def acquire(self, *arguments, **options):
        got = self._lock.acquire(*arguments, **options)
        stack = self.held.__dict__.setdefault("stack", [])
        stack.append(self)
        self.taken.append(1)
        self.most.append(len(set(stack)))
        return got

    def release(self):
        self.held.stack.remove(self)
        self._lock.release()

    def __enter__(self):
        return self.acquire()

    def __exit__(self, *error):
        self.release()


@pytest.mark.parametrize("exact_new", [True, False])
def test_no_lock_is_held_while_another_is_taken(monkeypatch, exact_new):
    monkeypatch.setattr(layer_module, "threading", SimpleNamespace(RLock=WatchedLock))
    WatchedLock.most.clear()
    cache = kvpact.create_cache("kivi:bits=2", geometry(3))
    config = kvpact.AttendConfig(exact_new=exact_new)
    for i in range(3):
        result = cache.prefill(i, *tokens(70, i, batch=2), config)
        cache.attend(i, **by_name(*tokens(40, i, batch=2)), config=config)
        cache.decode(i, *tokens(1, i, batch=2), config)
        assert result.k.shape[2] == 70
        cache.store(i, **by_name(*tokens(1, i, batch=2)[:2]), config=config)
        cache.dequantize(i, "k")
        cache.seq_len(i)
    with pytest.raises(kvpact.KVPactError):
        cache.attend(0, **by_name(*tokens(1, batch=1)), config=config)
    cache.memory_usage()
    cache.stats()
    fork = cache.fork()
    fork.reorder(torch.tensor([1, 0]))
    fork.select(torch.tensor([0]))
    fork.repeat(2)
    fork.truncate(20)
    fork.reset()
    cache.truncate(50)
    cache.reset()
    assert len(WatchedLock.most) > 50
    assert max(WatchedLock.most) == 1
    assert not WatchedLock.held.stack, "a lock was not released"


def test_paged_locks_are_taken_in_one_order(monkeypatch):
    """Layers' locks, the first layer's first, then the pool's; nothing else."""
    for module in (sequence_pages, pages):
        monkeypatch.setattr(module, "threading", SimpleNamespace(RLock=WatchedLock))
    cache = kvpact.PagedKVCache("kivi:bits=2", geometry(3), 40)
    order = {id(lock): place for place, lock in enumerate([*cache.layer_locks, cache.pool.lock])}
    pairs = set()
    acquire = WatchedLock.acquire

    def noting(self, *arguments, **options):
        held = [order[id(lock)] for lock in self.held.__dict__.get("stack", [])]
        assert order[id(self)] in held or all(place < order[id(self)] for place in held)
        pairs.update((place, order[id(self)]) for place in held)
        return acquire(self, *arguments, **options)

    monkeypatch.setattr(WatchedLock, "acquire", noting)
    view = cache.view()
    for config in (kvpact.AttendConfig(), kvpact.AttendConfig(exact_new=False)):
        for i in range(3):
            result = view.prefill(i, *tokens(70, i, batch=2), config)
            view.attend(i, **by_name(*tokens(3, i, batch=2)), config=config)
            assert result.k.shape[2] >= 70
            cache.layer_of(view.seqs[0], i).dequantize("k")
    first, second = view.seqs
    fork = cache.fork(first)
    cache.append(0, {fork: tuple(x[0] for x in tokens(40)[:2])})
    with pytest.raises(kvpact.KVPactError):
        cache.append(0, {first: tuple(x[0] for x in tokens(4000)[:2])})
    cache.truncate(first, 20)
    cache.publish(second, list(range(70)))
    cache.allocate(list(range(80)))
    cache.restore(cache.snapshot(second), seq=fork)
    view.reorder(torch.tensor([1, 0]))
    cache.memory_usage()
    cache.stats()
    view.reset()
    cache.free(fork)
    assert {(0, 1), (1, 2), (2, 3), (0, 3)} <= pairs
    assert not WatchedLock.held.stack, "a lock was not released"
