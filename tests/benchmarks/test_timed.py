"""Benchmarks time kvpact itself, and not a stub (defect C6)."""

import importlib.util
import re
from pathlib import Path

import pytest
import torch

from kvpact import CacheGeometry, PrefixCache, create_cache
from kvpact.stores import MemoryStore

GEOMETRY = CacheGeometry(2, 2, 16, dtype=torch.float32)
BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def filled(count, spec="turboquant:bits=4"):
    cache = create_cache(spec, GEOMETRY)
    generator = torch.Generator().manual_seed(0)
    for layer in range(2):
        k, v = torch.randn(2, 1, 2, 1024, 16, generator=generator)
        cache.prefill(layer, k[:, :, :count], v[:, :, :count])
    return cache


def source_of(name):
    return (BENCHMARKS / f"{name}.py").read_text("utf-8")


def modules_of(name):
    """A script and the modules beside it that it is made of."""
    found, open_ = set(), [name]
    while open_:
        one = open_.pop()
        found.add(one)
        imports = re.findall(r"^(?:from|import) (\w+)", source_of(one), re.M)
        open_ += [x for x in imports if (BENCHMARKS / f"{x}.py").exists() and x not in found]
    return found


@pytest.fixture
def beside(monkeypatch):
    """Scripts find the modules beside them, as when they are run."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))


def load(name):
    spec = importlib.util.spec_from_file_location(f"benchmark_{name}", BENCHMARKS / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


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
def test_every_benchmark_runs_kvpact_itself(beside, name):
    sources = [source_of(module) for module in modules_of(name)]
    # What lays figures out beside their targets measures nothing.
    assert name == "attend_lines" or any("from kvpact" in source for source in sources)
    for source in sources:
        for stub in ("time.sleep", "class Fake", "class Mock", "mock."):
            assert stub not in source
    assert callable(load(name).main)
