"""Benchmarks time kvpact itself, and not a stub (defect C6)."""

from pathlib import Path

import pytest
import torch
from by_path import module_at

from kvpact import CacheGeometry, PrefixCache
from kvpact.stores import MemoryStore

GEOMETRY = CacheGeometry(2, 2, 16, dtype=torch.float32)
BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def beside(monkeypatch):
    """Scripts find the modules beside them, as when they are run."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))


def load(name):
    return module_at(BENCHMARKS / f"{name}.py")


def test_the_benchmark_of_stores_times_the_real_thing(beside, tmp_path, monkeypatch):
    """The timed calls save what a cache holds and load it again; without them it fails."""
    bench = load("store")
    cache = bench.filled("turboquant:bits=4", GEOMETRY, 200)
    rows = bench.measure(cache, 1, tmp_path)
    whole = cache.snapshot()
    assert rows["file"]["bytes"] == whole.nbytes
    with MemoryStore() as store:
        PrefixCache(store, cache, model="random").save(list(range(200)))
        assert rows["memory"]["bytes"] == store.stats().bytes > 0
    assert all(row[name] > 0 for row in rows.values() for name in row)
    for name in ("save", "load"):
        monkeypatch.setattr(PrefixCache, name, lambda self, ids, name=name: 3)
        with pytest.raises(AssertionError, match="nothing was loaded"):
            bench.measure(cache, 1, tmp_path / name)
        monkeypatch.undo()


@pytest.mark.parametrize(
    "name", sorted(path.stem for path in BENCHMARKS.glob("*.py") if "def main(" in path.read_text())
)
def test_every_benchmark_loads_and_no_module_has_a_stub(beside, name):
    assert callable(load(name).main)
    for path in BENCHMARKS.glob("*.py"):
        for stub in ("time.sleep", "class Fake", "class Mock", "mock."):
            assert stub not in path.read_text("utf-8"), path


def test_candidates_take_turns(beside):
    """Warm rounds don't count, every second one goes back, what is rare comes in every fifth."""
    runner, order = load("runner"), []
    turns = {name: lambda name=name: order.append(name) or len(order) for name in "abc"}
    found = runner.in_turns(turns, 6, warm=1, back=True, rare=lambda warm: {min(warm)})
    assert "".join(order) == "cba" + "abc" + "cb" + "bc" + "cb" + "bc" + "cba"
    assert found["a"] == [4, 17] and found["b"] == [5, 8, 9, 12, 13, 16]
    calls, clock = [], iter([1.0, 4.0]).__next__
    turn = runner.turn_of(*(lambda n=n: calls.append(n) for n in range(3)), clock=clock, warm=1)
    assert turn() == 1.0 and calls == [0, 1, 2, 0]
    low, middle, high = runner.ratios([2.0, 6.0, 4.0], [1.0, 2.0, 4.0])
    assert (low, middle, high) == (1.5, 2.0, 2.5)
