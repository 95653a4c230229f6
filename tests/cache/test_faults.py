"""An interrupt or a failing allocation leaves every layer as before the call or as after it."""

import pytest
import torch
from tests.helpers.faults import disturbed, is_free, same_state

import kvpact
from kvpact import CacheGeometry, PagedKVCache
from kvpact.cache.layer.states import layer_state
from kvpact.errors import CorruptState, KernelError, StaleResult
from kvpact.kernels.cpu import library as native_library
from kvpact.kernels.cpu.encode import CpuEncoder
from kvpact.testing import random_tokens
from kvpact.testing.data import by_name

GEOMETRY = CacheGeometry(1, 2, 16, 8)
PAGED = CacheGeometry(2, 2, 16, 8)
SPECS = ["int:bits=8,sinks=2,window=8", "kivi:bits=2,sinks=0,window=0", "turboquant:bits=4"]
MOST = 40000  # more lines and operations than any of these calls has
# Every line and operation takes minutes; `make test-slow` tries more of them.
STRIDES = {
    ("interrupt", True): 7, ("interrupt", False): 41, ("memory", True): 2, ("memory", False): 11,
}  # fmt: skip
finely = pytest.mark.parametrize("finer", [1, pytest.param(3, marks=pytest.mark.slow)])


def tokens(count, seed=0, batch=1):
    return (
        random_tokens(batch, 2, count, 16, seed=3 * seed),
        random_tokens(batch, 2, count, 8, seed=3 * seed + 1),
        random_tokens(batch, 4, count, 16, seed=3 * seed + 2),
    )


def filled(spec, count=150, forked=False):
    cache = kvpact.create_cache(spec, GEOMETRY)
    cache.prefill(0, *tokens(count))
    return (cache, cache.fork()) if forked else (cache, None)


def state(cache):
    return layer_state(cache.entry(0))


OPERATIONS = {
    "one token": lambda cache: cache.attend(0, **by_name(*tokens(1, 1))),
    "a new segment": lambda cache: cache.attend(0, **by_name(*tokens(140, 2))),
    "store": lambda cache: cache.store(0, **by_name(*tokens(33, 3)[:2])),
    "truncate": lambda cache: cache.truncate(70),
    "select": lambda cache: cache.select(torch.tensor([0, 0])),
    "fork": lambda cache: cache.fork(),
    "reset": lambda cache: cache.reset(),
    "restore": lambda cache: cache.restore(SNAPSHOTS[str(cache.specs[0])]),
}
SNAPSHOTS = {}


@finely
@pytest.mark.parametrize("fault", ["interrupt", "memory"])
@pytest.mark.parametrize("name", OPERATIONS)
@pytest.mark.parametrize("spec", SPECS[:2])
def test_every_fault_leaves_a_layer_as_before_or_as_after(spec, name, fault, finer):
    operation = OPERATIONS[name]
    if name == "restore":
        other = filled(spec, 40)[0]
        SNAPSHOTS[str(other.specs[0])] = other.snapshot()
    cache, _ = filled(spec)
    before = state(cache)
    cache.store(0, **by_name(*tokens(70, 7)[:2]))
    going_on = state(cache)
    cache, _ = filled(spec)
    operation(cache)
    after, ends = state(cache), set()
    for n in range(1, MOST, -(-STRIDES[fault, name == "one token"] // finer)):
        cache, other = filled(spec, forked=n % 2 == 0)
        fired = disturbed(lambda cache=cache: operation(cache), fault, n)
        found = state(cache)
        unchanged = same_state(found, before)
        assert unchanged or same_state(found, after), f"fault {n}"
        assert other is None or same_state(state(other), before)
        assert is_free(cache.entry(0).lock)
        ends.add(unchanged)
        # The next call works, and writes where nothing was left.
        if unchanged:
            cache.store(0, **by_name(*tokens(70, 7)[:2]))
            assert same_state(state(cache), going_on), f"after fault {n}"
        if not fired:
            break
    assert not fired
    assert True in ends or n == 1


@pytest.mark.parametrize("spec", SPECS)
def test_interrupt_between_k_and_v_leaves_neither_stored(spec, monkeypatch):
    """As it was: K one call ahead of V, and then the native kernel read beyond V's tokens."""
    cache, _ = filled(spec)
    before, written = state(cache), []
    write = CpuEncoder.write

    def interrupted(self, *arguments):
        written.append(1)
        if len(written) == 2:
            raise KeyboardInterrupt
        write(self, *arguments)

    monkeypatch.setattr(CpuEncoder, "write", interrupted)
    with pytest.raises(KeyboardInterrupt):
        cache.attend(0, **by_name(*tokens(40, 2)))
    assert same_state(state(cache), before)
    monkeypatch.undo()
    output = cache.attend(0, **by_name(*tokens(40, 1)))
    assert torch.equal(output, filled(spec)[0].attend(0, **by_name(*tokens(40, 1))))


def test_streams_of_unlike_length_are_refused_by_name():
    cache, _ = filled("int:bits=8")
    entry = cache.entry(0)
    longer = filled("int:bits=8", 151)[0].entry(0)
    entry._held = entry._held._replace(k=longer.k)
    with pytest.raises(CorruptState, match="151 tokens of K and 150 of V"):
        cache.attend(0, **by_name(*tokens(1)))
    cache.reset()
    cache.attend(0, **by_name(*tokens(1)))


def test_status_of_the_encoder_is_a_named_error(monkeypatch):
    cache, _ = filled("int:bits=8,window=0")
    before = state(cache)
    monkeypatch.setattr(native_library(), "encode", lambda *_: 3)
    with pytest.raises(KernelError, match="status 3"):
        cache.attend(0, **by_name(*tokens(9)))  # too many for a step, which encodes by itself
    monkeypatch.undo()
    assert same_state(state(cache), before)
    cache.attend(0, **by_name(*tokens(1)))
    assert cache.seq_len() == 151


def paged(spec, pages=24):
    cache = PagedKVCache(spec, PAGED, pages)
    first = cache.allocate()
    for layer in range(2):
        cache.append(layer, {first: one(70, layer)})
    second = cache.fork(first)
    for layer in range(2):
        cache.append(layer, {second: one(33, 5 + layer)})
    return cache, [first, second]


def one(count, seed=0):
    return tuple(x[0] for x in tokens(count, seed)[:2])


def states(cache, seqs):
    return [layer_state(cache.layer_of(s, i)) for s in seqs for i in range(2)]


def pages_are_held_once(cache):
    free = cache.num_free_pages
    tables = [s.table for s in cache._sequences.values()]
    counts = [sum(table.count(page) for table in tables) for page in range(cache.num_pages)]
    return counts == cache.pool.references and free == counts.count(0)


@finely
@pytest.mark.parametrize("fault", ["interrupt", "memory"])
@pytest.mark.parametrize(("name", "operation"), {
    "append": lambda cache, seqs: cache.append(0, {s: one(40, 9 + s) for s in seqs}),
    "attend": lambda cache, seqs: cache.view(seqs).attend(0, **by_name(*tokens(3, 4, batch=2))),
    "truncate": lambda cache, seqs: cache.truncate(seqs[1], 20),
    "fork": lambda cache, seqs: cache.fork(seqs[0]),
    "select": lambda cache, seqs: cache.view(seqs).select(torch.tensor([1, 1])),
    "restore": lambda cache, seqs: cache.restore(cache.snapshot(seqs[0]), seq=seqs[1]),
    "free": lambda cache, seqs: cache.free(seqs[1]),
}.items())  # fmt: skip
def test_every_fault_leaves_all_sequences_as_before_or_as_after(name, operation, fault, finer):
    spec = "int:bits=4,sinks=2,window=8"
    cache, seqs = paged(spec)
    before = states(cache, seqs)
    operation(cache, seqs)
    left = [seq for seq in seqs if seq in cache._sequences]
    after = states(cache, left)
    for n in range(
        1, MOST, (15 if fault == "memory" else 51) // finer * (41 if name == "restore" else 1)
    ):
        cache, seqs = paged(spec)
        fired = disturbed(lambda cache=cache, seqs=seqs: operation(cache, seqs), fault, n)
        known = [seq for seq in seqs if seq in cache._sequences]
        found = states(cache, known)
        unchanged = known == seqs and all(map(same_state, found, before))
        assert unchanged or (known == left and all(map(same_state, found, after))), f"fault {n}"
        assert pages_are_held_once(cache), f"fault {n}"
        assert all(is_free(lock) for lock in [*cache.layer_locks, cache.pool.lock])
        if unchanged and fired:
            operation(cache, seqs)
            assert all(map(same_state, states(cache, left), after)), f"after fault {n}"
        for seq in list(cache._sequences):
            cache.free(seq)
        assert cache.num_free_pages == cache.num_pages
        if not fired:
            break
    assert not fired


def test_truncate_in_the_middle_of_a_step_is_not_undone(monkeypatch):
    """As it was: the commit brought back what was cut, over slots that were zeroed."""
    from kvpact.cache.paged import view as paged_view

    cache, seqs = paged("int:bits=8,sinks=0,window=0")
    attend = paged_view.attend_steps

    def truncating(*arguments):
        output = attend(*arguments)
        cache.truncate(seqs[1], 20)
        return output

    monkeypatch.setattr(paged_view, "attend_steps", truncating)
    with pytest.raises(StaleResult, match="none of them is stored"):
        cache.view(seqs).attend(0, **by_name(*tokens(9, 4, batch=2)))  # too many for a quick step
    assert [cache.seq_len(seq) for seq in seqs] == [70, 20]
    assert pages_are_held_once(cache)
    monkeypatch.undo()
    cache.view(seqs).attend(0, **by_name(*tokens(9, 4, batch=2)))
    assert [cache.seq_len(seq) for seq in seqs] == [79, 29]


def test_states_in_one_line():
    cache, _ = filled("kivi:bits=2,sinks=2,window=40", 150)
    entry = cache.entry(0)
    assert "\n" not in repr(entry)
    for part in ("length=150", "version=0", "clean=True", "packed=96", "tail=96:150"):
        assert part in repr(entry)
    assert "spare=0" in repr(entry.k)
