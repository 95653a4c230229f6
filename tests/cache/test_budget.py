"""A cache with a budget: the same bytes in whatever pieces, and never more of them than it has."""

from __future__ import annotations

import copy

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import settings
from hypothesis.stateful import precondition, rule
from tests.cache.test_state_machine import DIM, HEADS, SETTINGS, V_DIM, Histories, examples

import kvpact
from kvpact.cache.ladder import Budget, ladder_of
from kvpact.errors import BudgetExceeded
from kvpact.testing import LayerOracle, StreamOracle, random_offset

PLAIN = "weights=false,blocks=false"
LADDERS = {
    ("none", *(f"trellis:bits={bits},{PLAIN}" for bits in (4, 3, 2))): (torch.float32, 105_000),
    ("int:bits=8,sinks=2,window=9", "turboquant:bits=3,center=64,sinks=2,window=9"): (
        torch.float16,
        70_000,
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
        schedules = {}

        def ladders(rows):
            if rows not in schedules:
                schedules[rows] = whole.schedule(self.geometry, rows, self.dtype).layers[0]
            return schedules[rows]

        oracle = BudgetOracle(ladders, DIM, V_DIM, self.dtype, self.offset)
        self.pairs = [(self._new_cache(), oracle)]

    def _new_cache(self):
        offsets = None if self.offset is None else {0: self.offset}
        more = {"budget": self.budget, "rungs": self.rungs}
        return kvpact.create_cache("none", self.geometry, key_offsets=offsets, **more)

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
    schedule = Budget(budget, ladder_of(None, rungs, 1)).schedule(geometry, 1, dtype)
    assert schedule.layers[0][-1].tokens < 400 and schedule.max_tokens > 600
    assert len(schedule.layers[0]) > len(rungs) - 1


@examples
@pytest.mark.parametrize("rungs", LADDERS)
def test_histories(rungs, examples):
    run(rungs, examples)


def test_histories_of_keys_with_an_offset():
    run(next(iter(LADDERS)), 5, random_offset(HEADS, DIM, seed=1))


def run(rungs, examples, offset=None):
    dtype, budget = LADDERS[rungs]
    members = {"rungs": rungs, "dtype": dtype, "budget": budget, "offset": offset}
    case = type("Machine", (BudgetHistories,), members).TestCase
    case.settings = settings(SETTINGS, max_examples=examples)
    case("runTest").runTest()
