"""The paged cache: errors, atomic appends, bytes, tables, capacity."""

import pytest
import torch

from kvpact import CacheGeometry, PagedKVCache, create_cache, errors
from kvpact.testing import random_tokens, same_bytes

# One of each kind: no group, groups of K, of both, and a bias.
KINDS = ("int:bits=4", "kivi:bits=2", "turboquant:bits=3,center=64", "turboquant:bits=3,mode=prod")
GEOMETRY = CacheGeometry(2, 2, 32, 48)


def kv(tokens, seed=0, heads=2, dim=32, v_dim=48):
    k = random_tokens(heads, tokens, dim, seed=seed, offset=1.0)
    return k, random_tokens(heads, tokens, v_dim, seed=seed + 500)


def fill(cache, seq, tokens, seed=0):
    for layer in range(cache.geometry.num_layers):
        g = cache.geometry
        cache.append(layer, {seq: kv(tokens, seed, g.num_kv_heads, g.head_dim, g.value_dim)})


def state(cache):
    """Everything: free pages, tables, lengths, bytes of the pool and exact tokens."""
    entries = {
        (seq, i): layer for seq, s in cache._sequences.items() for i, layer in enumerate(s.layers)
    }
    exact = [x.clone() for layer in entries.values() for x in layer.tensors()]
    numbers = (
        cache.num_free_pages,
        list(cache.pool.references),
        {seq: list(s.table) for seq, s in cache._sequences.items()},
        {key: layer.length for key, layer in entries.items()},
    )
    return numbers, [*(x.clone() for x in cache.pool.tensors()), *exact]


def assert_same(a, b):
    assert a[0] == b[0]
    assert len(a[1]) == len(b[1])
    assert all(same_bytes(x, y) for x, y in zip(a[1], b[1], strict=True))


# --- named errors


@pytest.mark.parametrize("page_size", [0, 16, 33, -32, 96])
def test_wrong_page_size(page_size):
    with pytest.raises(errors.GeometryError):
        PagedKVCache("turboquant:bits=3,center=64", GEOMETRY, 4, page_size)


def test_page_size_is_the_least_common_multiple():
    assert PagedKVCache("int:bits=4", GEOMETRY, 1).pool.page_size == 32
    assert PagedKVCache("turboquant:bits=3,center=64", GEOMETRY, 1).pool.page_size == 64
    assert PagedKVCache("int:bits=4/kvarn:bits=3,group=128", GEOMETRY, 1).pool.page_size == 128
    assert PagedKVCache("int:bits=4", GEOMETRY, 1, 96).pool.page_size == 96


def test_wrong_layouts():
    with pytest.raises(errors.SpecError):
        create_cache("none", GEOMETRY, "ring")
    for options in ({}, {"num_pages": 4, "max_tokens": 9}):
        with pytest.raises(errors.GeometryError):
            create_cache("none", GEOMETRY, "paged", **options)
    with pytest.raises(errors.GeometryError):
        create_cache("none", GEOMETRY, num_pages=4)


@pytest.mark.parametrize("wrong", [7, -1, "a", None, True, 1.0])
def test_unknown_and_freed_ids(wrong):
    cache = PagedKVCache("none", GEOMETRY, 4)
    kept, gone = cache.allocate(), cache.allocate()
    fill(cache, kept, 40)
    cache.free(gone)
    before = state(cache)
    for seq in (wrong, gone):
        for call in (
            lambda s: cache.free(s), lambda s: cache.fork(s), lambda s: cache.seq_len(s),
            lambda s: cache.truncate(s, 0), lambda s: cache.reserve([kept, s], 100),
            lambda s: cache.append(0, {kept: kv(1), s: kv(1)}), lambda s: cache.publish(s, [1]),
            lambda s: cache.view([s]), lambda s: cache.block_table([kept, s]),
        ):  # fmt: skip
            with pytest.raises(errors.SequenceError):
                call(seq)
            assert_same(state(cache), before)
    assert cache.allocate() not in (kept, gone)  # ids are never used again


def test_a_batch_of_no_sequences_is_none():
    cache = PagedKVCache("int:bits=4", GEOMETRY, 4)
    cache.append(0, {})
    assert cache.step(0, {}) == [] and cache.num_free_pages == 4


def test_a_sequence_named_twice():
    cache = PagedKVCache("none", GEOMETRY, 4)
    seq = cache.allocate()
    fill(cache, seq, 3)
    before = state(cache)
    with pytest.raises(errors.SequenceError):
        cache.reserve([seq, seq], 40)
    with pytest.raises(errors.SequenceError):
        cache.view([seq, seq])
    assert_same(state(cache), before)


@pytest.mark.parametrize("spec", KINDS)
def test_an_append_that_fails_changes_nothing(spec):
    cache = PagedKVCache(spec, GEOMETRY, 6, 64)
    first, second, empty = (cache.allocate() for _ in range(3))
    fill(cache, first, 130)
    fill(cache, second, 70)
    fork = cache.fork(second)
    before = state(cache)
    good, bad = kv(10), kv(10)
    bad[1][-1, -1, -1] = torch.nan
    double = tuple(x.double() for x in good)
    for error, tokens in (
        (errors.CacheFull, {first: kv(3), fork: kv(3), empty: kv(65)}),
        (errors.CacheFull, {second: kv(3), fork: kv(1000)}),
        (errors.NonFiniteError, {first: good, second: good, empty: bad}),
        (errors.GeometryError, {first: good, second: (good[0], good[1][:, 1:])}),
        (errors.GeometryError, {first: good, second: (good[0][:1], good[1])}),
        (errors.GeometryError, {first: good, second: (good[0][0], good[1])}),
        (errors.GeometryError, {first: good, second: (good[0][:, :0], good[1][:, :0])}),
        (errors.DtypeError, {first: good, second: double}),
        (errors.DtypeError, {first: good, second: (good[0].tolist(), good[1])}),
        (errors.SequenceError, {first: good, 99: good}),
    ):
        with pytest.raises(error):
            cache.append(0, tokens)
        assert_same(state(cache), before)
    for layer in (-1, 2, None):
        with pytest.raises(errors.LayerIndexError):
            cache.append(layer, {first: good})
    with pytest.raises(errors.CacheFull) as caught:
        cache.reserve([first, empty], 1000)
    assert "of 6 free" in str(caught.value)  # what was wanted and what is there
    with pytest.raises(errors.GeometryError):
        cache.reserve([first, second], [1])
    assert_same(state(cache), before)


# --- tables


def test_tables_are_what_engines_read():
    cache = PagedKVCache("int:bits=4", GEOMETRY, 8)
    a, b, c = (cache.allocate() for _ in range(3))
    fill(cache, a, 70)
    fill(cache, b, 32)
    table = cache.block_table([a, b, c])
    assert table.dtype == torch.int32 and table.shape == (3, 3)
    assert (table[0] >= 0).all()
    assert table[1].tolist() == [cache.block_table(b)[0].item(), -1, -1]
    assert table[2].tolist() == [-1, -1, -1]
    assert len(set(table[table >= 0].tolist())) == 4
    assert cache.num_free_pages == 4
    cache.reserve([a], 60)
    assert cache.block_table(a).shape == (5,)  # where new tokens are going to stand
    assert cache.block_table(a)[:3].tolist() == table[0].tolist()


def test_reserved_pages_are_enough_for_all_layers():
    cache = PagedKVCache("int:bits=4", GEOMETRY, 6)
    a, b = cache.allocate(), cache.allocate()
    cache.reserve([a, b], 90)
    assert cache.num_free_pages == 0
    for layer in range(2):
        cache.append(layer, {a: kv(90), b: kv(90)})
    assert cache.num_free_pages == 0
