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


def test_the_benchmark_of_stores_times_the_real_thing(tmp_path, monkeypatch):
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
