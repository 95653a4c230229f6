"""Chunks that are damaged, gone, or not what they say: a shorter prefix, never a wrong byte."""

import warnings

import pytest
import torch

from kvpact import PrefixCache, create_cache
from kvpact.errors import FormatError, StoreUnavailable
from kvpact.prefixes.chunks import Prefix
from kvpact.stores import EncryptedStore, MemoryStore, StoreWarning, open_store

from .conftest import GEOMETRY, fill

SPEC = "turboquant:bits=4,window=0"


@pytest.fixture
def saved(store, ids):
    cache = fill(create_cache(SPEC, GEOMETRY), ids)
    prefixes = PrefixCache(store, cache, model="m")
    prefixes.save(ids)
    return prefixes.keys(ids), cache


def empty(store):
    cache = create_cache(SPEC, GEOMETRY)
    return PrefixCache(store, cache, model="m"), cache


def load(store, ids):
    prefixes, cache = empty(store)
    return prefixes.load(ids), cache


def same_start(cache, whole, tokens):
    """The first tokens' slots and sinks are those of the cache that was saved."""
    one, two = (c.snapshot(page_size=64).slice(0, tokens) for c in (cache, whole))
    return one.digest == two.digest


@pytest.mark.parametrize("index", range(4))
def test_every_kind_of_damage_shortens_the_prefix(store, ids, saved, index):
    keys, whole = saved
    good = store.get(keys[index])
    other = store.get(keys[(index + 1) % 4])
    middle = len(good) // 2
    bad = [good[:-1], good[:middle], b"", b"no chunk at all", other, good + b"\0"]
    generator = torch.Generator().manual_seed(index)
    sampled = torch.randint(0, len(good) * 8, (15,), generator=generator).tolist()
    for bit in (*range(0, 3200, 296), 8 * middle, 8 * (len(good) - 1), *sampled):
        flipped = bytearray(good)
        flipped[bit // 8] ^= 1 << bit % 8
        bad.append(bytes(flipped))
    for blob in bad:
        store.put(keys[index], blob)
        with pytest.warns(StoreWarning, match=f"chunk {index} of 4"):
            held, cache = load(store, ids)
        assert held == cache.seq_len(0) == 64 * index
        if held:
            assert same_start(cache, whole, held)
        assert keys[index] not in store, "what is damaged goes, so that it is written anew"
    assert PrefixCache(store, whole, model="m").save(ids) == 1
    with warnings.catch_warnings(action="error"):
        assert load(store, ids)[0] == 256


def test_a_chunk_of_other_tokens_or_another_model_is_refused(store, ids, saved):
    """Whoever can write to a store can put entries under each other's keys."""
    keys, _ = saved
    for options, tokens in (({"model": "x"}, ids), ({"model": "m"}, [*ids[:64], *ids[:64][::-1]])):
        prefixes = PrefixCache(store, fill(create_cache(SPEC, GEOMETRY), tokens), **options)
        prefixes.save(tokens)
        store.put(keys[1], store.get(prefixes.keys(tokens)[1]))
        with pytest.warns(StoreWarning, match="chunk 1 of 4"):
            assert load(store, ids)[0] == 64
        PrefixCache(store, fill(create_cache(SPEC, GEOMETRY), ids), model="m").save(ids)


def test_a_missing_chunk_ends_the_prefix_without_a_word(store, ids, saved):
    keys, _ = saved
    store.delete(keys[2])
    with warnings.catch_warnings(action="error"):
        assert load(store, ids)[0] == 128


def test_a_chunk_that_goes_between_match_and_load_is_said(store, ids, saved, monkeypatch):
    keys, _ = saved
    store.delete(keys[3])
    monkeypatch.setattr(store, "contains_many", lambda keys: [True] * len(keys))
    with pytest.warns(StoreWarning, match="chunk 3 of 4 can't be used .it is gone"):
        assert load(store, ids)[0] == 192


def test_a_dead_server_is_a_miss_and_saving_says_so(ids):
    url = "redis://127.0.0.1:1"  # nothing listens on port 1
    pytest.importorskip("redis")
    cache = fill(create_cache(SPEC, GEOMETRY), ids)
    with warnings.catch_warnings(action="ignore", category=StoreWarning):
        store = open_store(url, timeout=0.2)
        assert load(store, ids)[0] == 0
        with pytest.raises(StoreUnavailable):
            PrefixCache(store, cache, model="m").save(ids)
        store.close()


def test_the_end_of_a_prefix_is_evicted_before_its_beginning(tmp_path, ids):
    cache = fill(create_cache(SPEC, GEOMETRY), ids)
    with open_store(tmp_path) as store:
        prefixes = PrefixCache(store, cache, model="m")
        prefixes.save(ids)
        size = sum(len(store.get(key)) for key in reversed(prefixes.keys(ids)))
        assert load(store, ids)[0] == 256
    with open_store(tmp_path, max_bytes=size * 3 // 4) as store:
        store.gc()
        assert 0 < load(store, ids)[0] < 256


def test_an_entry_that_is_there_and_never_read_is_written_anew(store, ids):
    """As with a secret that was changed: the store says yes, and gives nothing."""
    whole = fill(create_cache(SPEC, GEOMETRY), ids)
    old, new = (EncryptedStore(store, bytes([n]) * 32) for n in (1, 2))
    assert PrefixCache(old, whole, model="m").save(ids[:300]) == 4
    prefixes, cache = empty(new)
    with pytest.warns(StoreWarning) as said:
        assert prefixes.load(ids) == 0
    assert "chunk 0 of 4" in str(said[-1].message)
    assert prefixes.match(ids) == 0
    fill(cache, ids)
    assert prefixes.save(ids) == 4
    assert prefixes.match(ids) == 256 and prefixes.save(ids) == 0
    with warnings.catch_warnings(action="error"):
        held, loaded = load(new, ids)
    assert held == 256 and same_start(loaded, whole, 256)


def test_what_another_process_has_repaired_is_loaded(store, ids, saved, monkeypatch):
    keys, _ = saved
    (prefixes, cache), get = empty(store), store.get_unverified

    def without(asked):
        return [None if k == keys[2] else x for k, x in zip(asked, get(asked), strict=True)]

    monkeypatch.setattr(store, "get_unverified", without)
    with pytest.warns(StoreWarning, match="chunk 2 of 4"):
        assert prefixes.load(ids) == 128
    monkeypatch.undo()
    cache.reset()
    assert prefixes.load(ids) == 256
    assert prefixes.save(ids[:256]) == 0


def test_damage_that_can_not_be_removed_is_a_miss(store, ids, saved, monkeypatch):
    keys, _ = saved
    store.put(keys[1], b"no chunk at all")

    def dead(key):
        raise StoreUnavailable("the server does not answer")

    monkeypatch.setattr(store, "delete", dead)
    prefixes, cache = empty(store)
    with pytest.warns(StoreWarning) as said:
        assert prefixes.load(ids) == cache.seq_len(0) == 64
    assert [str(w.message).partition(" (")[0].partition(":")[0] for w in said] == [
        "damaged chunks stay", "chunk 1 of 4 can't be used"
    ]  # fmt: skip
    fill(cache, ids, start=64)
    assert prefixes.save(ids) == 1
    assert load(store, ids)[0] == 256


def test_a_chunk_with_right_checksums_that_no_cache_could_have_written(store, ids):
    """Its exact tokens are not finite; the chunks before it are taken."""
    spec = "turboquant:bits=4,sinks=100,window=0"
    cache = fill(create_cache(spec, GEOMETRY), ids)
    prefixes = PrefixCache(store, cache, model="m")
    prefixes.save(ids)
    keys, first = prefixes.keys(ids), store.get(prefixes.keys(ids)[0])
    cache.entry(0).k.sinks[:, :, 70] = torch.nan
    with MemoryStore() as other:
        PrefixCache(other, cache, model="m").save(ids)
        assert other.get(keys[0]) == first
        store.put(keys[1], other.get(keys[1]))
    loaded = create_cache(spec, GEOMETRY)
    with pytest.warns(StoreWarning, match="chunk 1 of 4 .*not finite"):
        assert PrefixCache(store, loaded, model="m").load(ids) == loaded.seq_len(1) == 64
    assert keys[1] not in store


def test_chunks_that_can_not_be_joined_are_a_miss(store, ids, saved, monkeypatch):
    _, whole = saved

    def refuse(self, count, records):
        raise FormatError("the snapshot can't be right: no reason")

    prefixes, cache = empty(store)
    with monkeypatch.context() as patched:
        patched.setattr(Prefix, "state", refuse)
        with pytest.warns(StoreWarning, match="chunk 0 of 4 .*no reason"):
            assert prefixes.load(ids) == cache.seq_len(0) == 0
    assert len(store) == 0
    assert PrefixCache(store, whole, model="m").save(ids) == 4
    assert load(store, ids)[0] == 256
