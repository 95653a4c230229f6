"""Prefixes that another process of a Mooncake cluster stored; faults shorten them."""

import subprocess
import sys
import warnings

import pytest

from kvpact import PrefixCache, create_cache
from kvpact.errors import StoreUnavailable
from kvpact.stores import MemoryStore, MooncakeStore, StoreWarning

from .conftest import GEOMETRY, fill

SPEC = "turboquant:bits=4,window=0"
SAVE = """
import json, sys, torch
from kvpact import CacheGeometry, PrefixCache, Snapshot, create_cache
from kvpact.stores import open_store
url, spec, snapshot, ids = sys.argv[1:]
cache = create_cache(spec, CacheGeometry(2, 2, 32, 16, torch.float32))
cache.restore(Snapshot.load(snapshot))
with open_store(url, timeout=20.0) as store:
    print(PrefixCache(store, cache, model="m").save(json.loads(ids)))
"""

pytestmark = pytest.mark.timeout(120)  # none of these may hang


@pytest.fixture
def master(master):
    with connect(MooncakeStore, master, segment_size="64MiB"):
        yield master


def connect(kind, master, **options):
    return kind(master.url, **{"timeout": 20.0, "retry_after": 0.0} | options)


def load(store, ids):
    cache = create_cache(SPEC, GEOMETRY)
    return PrefixCache(store, cache, model="m").load(ids), cache


def start(cache, tokens):
    return cache.snapshot(page_size=64).slice(0, tokens).digest


def test_a_prefix_of_another_process_has_the_same_bytes(master, ids, tmp_path):
    whole = fill(create_cache(SPEC, GEOMETRY), ids)
    whole.snapshot().save(tmp_path / "whole.safetensors")
    saved = subprocess.run(
        [sys.executable, "-c", SAVE, master.url, SPEC, tmp_path / "whole.safetensors", str(ids)],
        stdout=subprocess.PIPE, text=True, check=True, timeout=120,
    )  # fmt: skip
    assert saved.stdout.strip() == "4"
    memory = MemoryStore()
    PrefixCache(memory, whole, model="m").save(ids)
    with connect(MooncakeStore, master) as store, warnings.catch_warnings(action="error"):
        assert sorted(store) == sorted(memory)
        assert all(store.get(key) == memory.get(key) for key in memory)
        held, cache = load(store, ids)
    assert held == 256 and start(cache, 256) == start(whole, 256)


def test_a_master_killed_in_the_middle_of_a_load(master, ids):
    whole = fill(create_cache(SPEC, GEOMETRY), ids)
    read = []

    class Interrupted(MooncakeStore):
        def get(self, key):
            if len(read) == 2:
                master.kill()
            read.append(key)
            return super().get(key)

    with connect(Interrupted, master, timeout=1.0) as store:
        prefixes = PrefixCache(store, whole, model="m")
        assert prefixes.save(ids) == 4
        with pytest.warns(StoreWarning):
            held, cache = load(store, ids)
        assert len(read) > 2 and held == cache.seq_len(0) and held in (0, 64, 128, 192)
        if held:
            assert start(cache, held) == start(whole, held)
        with pytest.raises(StoreUnavailable), warnings.catch_warnings():
            warnings.simplefilter("ignore", StoreWarning)
            prefixes.save(ids)


def test_a_frozen_master_costs_no_more_than_a_timeout(master, ids):
    whole = fill(create_cache(SPEC, GEOMETRY), ids)
    with connect(MooncakeStore, master, timeout=1.0, retry_after=3600) as store:
        assert PrefixCache(store, whole, model="m").save(ids) == 4
        with master.frozen(), pytest.warns(StoreWarning):
            assert [load(store, ids)[0] for _ in range(20)] == [0] * 20
