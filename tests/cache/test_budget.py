"""A cache with a budget: the same bytes in whatever pieces, and never more of them than it has."""

import copy
import random
from functools import cache
from itertools import accumulate

import hypothesis.strategies as st
import pytest
import torch
from hypothesis.stateful import invariant, precondition, rule
from random_cases import run_histories
from tests.cache.test_state_machine import DIM, HEADS, STEPS, V_DIM, Histories, examples
from tests.helpers.faults import same_state

import kvpact
from kvpact.cache.budget.budget import Budget, ladder_of
from kvpact.cache.layer.states import layer_state
from kvpact.errors import BudgetExceeded, SpecError
from kvpact.testing import LayerOracle, StreamOracle, held_bytes, random_offset, random_tokens

PLAIN = "weights=false,blocks=false"
LADDERS = {
    ("none", *(f"trellis:bits={bits},{PLAIN}" for bits in (4, 3, 2))): (torch.float32, 80_000),
    ("int:bits=8,sinks=2,window=9", "turboquant:bits=3,center=64,sinks=2,window=9"): (
        torch.float16,
        50_000,
    ),
}


class BudgetOracle(LayerOracle):
    """A layer that is given what it shows anew, by the next spec, where its ladder says so."""

    def __init__(self, ladders, dim, v_dim, dtype, offset=None):
        self.ladders, self.rung, self.rows = ladders, 0, 0
        super().__init__(ladders(1)[0][1], dim, v_dim, dtype, offset)

    def reset(self):
        self.rung = self.rows = 0
        super().reset()

    def append(self, k, v, padding=None):
        if not self.batch:
            self.reset()
            self.rows = k.shape[0]
            self._spec = self.ladders(self.rows)[0][1]
            super().reset()
        for length, spec in self.ladders(self.rows)[1 + self.rung :]:
            if self.length + k.shape[2] <= length:
                break
            count = length - self.length
            if count:
                super().append(k[:, :, :count], v[:, :, :count], padding)
                k, v = k[:, :, count:], v[:, :, count:]
            self.climb(spec)
        super().append(k, v, padding)

    def climb(self, spec):
        before, self._spec, self.rung = self._spec, spec, self.rung + 1
        codecs = spec.codecs(*self._widths, self._dtype)
        for side, codec, old, method in zip(
            "kv", codecs, (before.key, before.value), (spec.key, spec.value), strict=True
        ):
            stream = getattr(self, side)
            if old == method:
                continue
            if stream.codec.state():
                codec = codec.restore(stream.codec.state())
            made = StreamOracle(codec, method.sinks, method.window, self._offset)
            if side == "v":
                made.offset = None
            elif made.offset is not None:
                made.offset = made.offset.begun_at(tuple(self.padding))
            made.append(stream.read(self.padding), self.padding)
            setattr(self, side, made)

    def fork(self):
        other = copy.copy(self)
        other.k, other.v = copy.deepcopy(self.k), copy.deepcopy(self.v)
        return other


class BudgetHistories(Histories):
    """Histories of a cache that takes rungs on the way."""

    rungs: tuple[str, ...] = ()
    budget = 0

    def __init__(self):
        super().__init__()
        self.spec = "a ladder"
        whole = Budget(self.budget, ladder_of(None, self.rungs, 1))
        self.schedule = cache(lambda rows: whole.schedule(self.geometry, rows, self.dtype))
        ladders = lambda rows: self.schedule(rows).layers[0]  # noqa: E731
        oracle = BudgetOracle(ladders, DIM, V_DIM, self.dtype, self.offset)
        self.pairs = [(self._new_cache(), oracle)]

    def _new_cache(self):
        offsets = None if self.offset is None else {0: self.offset}
        more = {"budget": self.budget, "rungs": self.rungs}
        return kvpact.create_cache("none", self.geometry, key_offsets=offsets, **more)

    @property
    def most(self):
        return min(430, self.schedule(self.oracle.rows or 3).max_tokens - 70)

    def _make_room(self, count):
        """Let cache and oracle go down where the tokens would not fit on the way."""
        if self.oracle.length:
            given = self._tokens(self.oracle.batch, count)
            self.cache._make_room(0, *given, kvpact.AttendConfig())
            spec = self.cache.entry(0).spec
            if spec != self.oracle._spec:
                specs = [change.spec for change in self.oracle.ladders(self.oracle.rows)]
                self.oracle.rung = specs.index(spec) - 1
                self.oracle.climb(spec)

    @invariant()
    def no_more_bytes_than_the_budget(self):
        assert all(cache.memory_usage() <= self.budget for cache, _ in self.pairs)

    def _fits(self, rows):
        if rows <= self.oracle.rows:
            return True
        with pytest.raises(BudgetExceeded, match="rows"):
            self.cache.select(torch.zeros(rows, dtype=torch.int64))
        return False

    @precondition(lambda self: self.oracle.batch)
    @rule(picks=st.lists(st.integers(0, 5), min_size=1, max_size=4), same=st.booleans())
    def select(self, picks, same):
        if same or self._fits(len(picks)):
            super().select(picks, same)

    @precondition(lambda self: self.oracle.batch and self.oracle.batch < 3)
    @rule(times=st.integers(1, 2))
    def repeat(self, times):
        if self._fits(times * self.oracle.batch):
            super().repeat(times)


@pytest.mark.parametrize("rungs", LADDERS)
def test_histories_take_every_rung(rungs):
    dtype, budget = LADDERS[rungs]
    geometry = kvpact.CacheGeometry(1, HEADS, DIM, V_DIM, dtype)
    whole = Budget(budget, ladder_of(None, rungs, 1))
    schedule = whole.schedule(geometry, 1, dtype)
    assert schedule.layers[0][-1].tokens < 400 and schedule.max_tokens > 600
    assert len(schedule.layers[0]) > len(rungs) - 1


@examples
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("rungs", LADDERS)
def test_histories(rungs, rows, examples):
    run(rungs, examples // 2, rows)


def test_histories_of_keys_with_an_offset():
    run(next(iter(LADDERS)), 5, 1, random_offset(HEADS, DIM, seed=1))


def run(rungs, examples, rows, offset=None):
    """Run histories of a budget within which so many rows take rungs."""
    dtype, budget = LADDERS[rungs]
    members = {"rungs": rungs, "dtype": dtype, "budget": rows * budget, "offset": offset}
    run_histories(BudgetHistories, STEPS, examples, **members)


SHAPE = kvpact.CacheGeometry(4, 2, 32, dtype=torch.bfloat16)
BYTES = 450_000


def grown(pieces, total=1400, budget=BYTES, cache=None, **options):
    """Return a cache of four layers with tokens that came in pieces; it never had more bytes."""
    cache = cache or kvpact.create_cache("none", SHAPE, budget=budget, **options)
    given = [
        random_tokens(1, heads, total, 32, seed=seed, dtype=torch.bfloat16)
        for seed, heads in enumerate((2, 2, 4) * 4)
    ]
    start, sizes = 0, iter(pieces)
    while start < total:
        part = slice(start, min(start + next(sizes), total))
        for layer in range(4):
            k, v, q = (x[:, :, part] for x in given[3 * layer : 3 * layer + 3])
            output = cache.attend(layer, k=k, v=v, q=q)
            assert output.isfinite().all()
            assert cache.memory_usage() == held_bytes(cache) <= budget
        start = part.stop
    return cache


def states(cache):
    return [layer_state(cache.entry(layer)) for layer in range(4)]


def test_bytes_are_the_same_in_whatever_pieces_and_by_whatever_backend():
    whole = grown([1400])
    specs = {str(spec) for spec in whole.specs}
    assert specs >= {"trellis:bits=2/trellis:bits=3", "trellis:bits=2"}
    generator = random.Random(0)
    pieces = {
        "steps": [64] * 8 + [1] * 100 + [64] * 13,
        "some": [generator.choice((1, 3, 33, 64)) for _ in range(1400)],
    }
    for name, sizes in pieces.items():
        assert all(map(same_state, states(grown(sizes)), states(whole))), name
    few = {"total": 500, "budget": 250_000}
    assert {str(spec) for spec in grown([500], **few).specs} == {"trellis:bits=2"}
    plain = grown([64] * 8, backend="torch", **few)
    assert all(map(same_state, states(plain), states(grown([500], **few))))


def test_keys_take_over_what_they_learnt_with_other_blocks():
    """At 6 bits K has one block of channels, at 4 bits three, with deviations that are learnt."""
    shape = kvpact.CacheGeometry(1, 2, 64, dtype=torch.float32)
    k, v, q = (random_tokens(1, 2, 640, 64, seed=seed, offset=1) for seed in (1, 2, 3))
    found = []
    for size in (64, 640):
        rungs = [f"trellis:bits={bits}" for bits in (6, 4, 2)]
        cache, states = kvpact.create_cache(rungs[0], shape, budget=360_000, rungs=rungs), {}
        for parts in zip(*(x.split(size, 2) for x in (k, v, q)), strict=True):
            cache.attend(0, k=parts[0], v=parts[1], q=parts[2])
            states[cache.specs[0].key.bits] = cache.entry(0).k.codec.state()
        found.append(layer_state(cache.entry(0)))
        if size == 64:
            one, three = states[6], states[4]
    assert same_state(*found)
    direct = kvpact.create_cache("trellis:bits=4", shape)
    direct.attend(0, k=k, v=v, q=q)
    wanted = direct.entry(0).k.codec.state()
    for name in ("first", "weight", "order"):
        assert torch.equal(one[name], three[name]), name
    assert one["deviation"].eq(1).all() and three["deviation"].shape == (2, 3)
    torch.testing.assert_close(three["deviation"], wanted["deviation"], atol=0.01, rtol=0)
    assert wanted["deviation"].amax() > 1.1


def test_what_it_tells():
    cache = kvpact.create_cache("none", SHAPE, budget="450kB")
    assert cache.stats()["budget"] == {"bytes": BYTES}
    cache = grown([64] * 22)
    told = cache.stats()["budget"]
    assert told["bytes"] == BYTES and told["max_tokens"] >= 1400 and 2 < told["bits"] < 3.4
    assert sum(told["specs"].values()) == 4 and cache.spec == "mixed"
    schedule = cache._schedule
    lengths = [0, *schedule.lengths(), schedule.max_tokens]
    bits = [schedule.bits(length) for length in lengths]
    assert bits == sorted(bits, reverse=True) and bits[0] == 16
    assert told["next"] in (None, *lengths)
    held = [sum(schedule.layer_bytes(i, n) for i in range(4)) for n in lengths if n <= 1400]
    assert max(held) <= BYTES


def test_what_does_not_fit_is_refused_before_anything_is_written():
    with pytest.raises(BudgetExceeded, match=r"no room for 64 tokens of 1 row; the least one is"):
        grown([64] * 22, budget=20_000)
    cache = grown([64] * 22)
    most, before = cache.stats()["budget"]["max_tokens"], states(cache)
    k = torch.zeros(1, 2, most - 1400 + 1, 32, dtype=torch.bfloat16)
    with pytest.raises(BudgetExceeded, match=f"at the lowest rungs {most:,} do"):
        cache.store(0, k=k, v=k)
    assert all(map(same_state, states(cache), before))
    with pytest.raises(BudgetExceeded, match="planned for 1 rows, not 2"):
        cache.repeat(2)
    assert all(map(same_state, states(cache), before))


@pytest.mark.parametrize("total", [100, 300, 1400])
def test_snapshots_go_on_as_the_cache_does(total):
    cache = grown([64] * 22, total=total)
    other = kvpact.create_cache("none", SHAPE, budget=BYTES)
    other.restore(cache.snapshot())
    assert all(map(same_state, states(other), states(cache)))
    if total == 1400:
        smaller = kvpact.create_cache("none", SHAPE, budget=BYTES * 9 // 10)
        with pytest.raises(BudgetExceeded, match="restore it into a cache with the budget"):
            smaller.restore(cache.snapshot())
        assert smaller.seq_len(0) == 0
    for step in range(200):
        given = {"seed": step, "dtype": torch.bfloat16}
        k, v, q = (random_tokens(1, heads, 1, 32, **given) for heads in (2, 2, 4))
        for layer in range(4):
            outputs = [x.attend(layer, k=k, v=v, q=q) for x in (cache, other)]
            assert torch.equal(*outputs)
    assert all(map(same_state, states(other), states(cache)))


def test_rotated_keys_of_latents_have_8_bits_on_every_rung():
    shape = kvpact.CacheGeometry(2, 1, 64, 32, dtype=torch.float32, latent=True)
    for spec, first in (("none", ["none", "trellis:bits=6/int:bits=8"]), ("trellis:bits=4", [])):
        cache = kvpact.create_cache(spec, shape, budget="1MB")
        rungs = [str(rung[1]) for rung in cache.budget.rungs]
        assert rungs == [*first, *(f"trellis:bits={bits}/int:bits=8" for bits in (4, 3, 2))]
        assert str(cache.specs[0]) == rungs[0]


def test_what_can_t_go_with_a_budget():
    for options, message in (
        ({"budget": "much"}, "no number of bytes"),
        ({"budget": True}, "no number of bytes"),
        ({"budget": 0}, "no number of bytes"),
        ({"rungs": ["none"]}, "rungs and context go with a budget"),
        ({"context": 9}, "rungs and context go with a budget"),
        ({"budget": "25%"}, "add context="),
        ({"budget": BYTES, "rungs": "none"}, "a sequence of specs"),
        ({"budget": BYTES, "rungs": ["trellis:bits=2", "trellis:bits=3"]}, "fewer bits"),
        ({"budget": BYTES, "rungs": ["int:bits=8", "int:bits=4,sinks=0"]}, "the same sinks="),
        ({"budget": BYTES, "rungs": ["vq:dims=2", "vq"]}, "rungs that learn unlike things"),
        ({"budget": BYTES, "calibration": {}}, "calibration can't go with a budget"),
        ({"budget": BYTES, "layout": "paged", "num_pages": 4}, "for contiguous caches"),
    ):
        with pytest.raises(SpecError, match=message):
            kvpact.create_cache("none", SHAPE, **options)
    with pytest.raises(SpecError, match="reserve can't go with a budget"):
        grown([100], total=100).reserve(8)


@pytest.mark.parametrize("size", [64, 1400])
def test_no_call_ever_takes_more_than_the_budget_while_it_works(size):
    """All of torch's allocations count, also those of what is compressed again."""
    given = [random_tokens(1, 2, 1400, 32, seed=seed, dtype=torch.bfloat16) for seed in (0, 1)]
    cache = kvpact.create_cache("none", SHAPE, budget=BYTES)
    rungs = 0
    for start in range(0, 1400, size):
        k, v = (x[:, :, start : start + size] for x in given)
        for layer in range(4):
            before, spec = cache.memory_usage(), cache.specs[layer]
            assert before + most_allocated(cache, layer, k, v) <= BYTES
            rungs += cache.specs[layer] != spec
    assert rungs >= 4


def most_allocated(cache, layer, k, v):
    """Return the most bytes that torch allocated on the CPU at a time, less those freed."""
    cpu = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=cpu, profile_memory=True) as profile:
        cache.store(layer, k=k, v=v)
    events = profile.profiler.kineto_results.events()
    sizes = [(x.start_ns(), i, x.nbytes()) for i, x in enumerate(events) if x.name() == "[memory]"]
    return max(accumulate(size for _, _, size in sorted(sizes)), default=0)
