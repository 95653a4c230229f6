"""The paged cache: errors, atomic appends, bytes, tables, capacity."""

import pytest
import torch

from kvpact import CacheGeometry, PagedKVCache, create_cache
from kvpact.errors import (
    CacheFull,
    DtypeError,
    GeometryError,
    LayerIndexError,
    NonFiniteError,
    SequenceError,
    SpecError,
)
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


@pytest.mark.parametrize("num_pages", [0, -1, 1.5, None, True])
def test_wrong_number_of_pages(num_pages):
    with pytest.raises(GeometryError):
        PagedKVCache("none", GEOMETRY, num_pages)


@pytest.mark.parametrize("page_size", [0, 16, 33, -32, 96])
def test_wrong_page_size(page_size):
    with pytest.raises(GeometryError):
        PagedKVCache("turboquant:bits=3,center=64", GEOMETRY, 4, page_size)


def test_page_size_is_the_least_common_multiple():
    assert PagedKVCache("int:bits=4", GEOMETRY, 1).pool.page_size == 32
    assert PagedKVCache("turboquant:bits=3,center=64", GEOMETRY, 1).pool.page_size == 64
    assert PagedKVCache("int:bits=4/kvarn:bits=3,group=128", GEOMETRY, 1).pool.page_size == 128
    assert PagedKVCache("int:bits=4", GEOMETRY, 1, 96).pool.page_size == 96


def test_wrong_layouts():
    with pytest.raises(SpecError):
        create_cache("none", GEOMETRY, "ring")
    for options in ({}, {"num_pages": 4, "max_tokens": 9}):
        with pytest.raises(GeometryError):
            create_cache("none", GEOMETRY, "paged", **options)
    with pytest.raises(GeometryError):
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
            lambda s: cache.free(s),
            lambda s: cache.fork(s),
            lambda s: cache.seq_len(s),
            lambda s: cache.truncate(s, 0),
            lambda s: cache.reserve([kept, s], 100),
            lambda s: cache.append(0, {kept: kv(1), s: kv(1)}),
            lambda s: cache.publish(s, [1]),
            lambda s: cache.view([s]),
            lambda s: cache.block_table([kept, s]),
        ):
            with pytest.raises(SequenceError):
                call(seq)
            assert_same(state(cache), before)
    assert cache.allocate() not in (kept, gone)  # ids are never used again


def test_a_sequence_named_twice():
    cache = PagedKVCache("none", GEOMETRY, 4)
    seq = cache.allocate()
    fill(cache, seq, 3)
    before = state(cache)
    with pytest.raises(SequenceError):
        cache.reserve([seq, seq], 40)
    with pytest.raises(SequenceError):
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
        (CacheFull, {first: kv(3), fork: kv(3), empty: kv(65)}),
        (CacheFull, {second: kv(3), fork: kv(1000)}),
        (NonFiniteError, {first: good, second: good, empty: bad}),
        (GeometryError, {first: good, second: (good[0], good[1][:, 1:])}),
        (GeometryError, {first: good, second: (good[0][:1], good[1])}),
        (GeometryError, {first: good, second: (good[0][0], good[1])}),
        (GeometryError, {first: good, second: (good[0][:, :0], good[1][:, :0])}),
        (DtypeError, {first: good, second: double}),
        (DtypeError, {first: good, second: (good[0].tolist(), good[1])}),
        (SequenceError, {first: good, 99: good}),
    ):
        with pytest.raises(error):
            cache.append(0, tokens)
        assert_same(state(cache), before)
    for layer in (-1, 2, None):
        with pytest.raises(LayerIndexError):
            cache.append(layer, {first: good})
    with pytest.raises(CacheFull) as caught:
        cache.reserve([first, empty], 1000)
    assert "of 6 free" in str(caught.value)  # what was wanted and what is there
    with pytest.raises(GeometryError):
        cache.reserve([first, second], [1])
    assert_same(state(cache), before)


def test_norms_out_of_range_give_the_pages_back():
    cache = PagedKVCache("kivi:bits=2", GEOMETRY, 6)
    first, second = cache.allocate(), cache.allocate()
    fill(cache, first, 10)
    before = state(cache)
    huge = tuple(x * 1e5 for x in kv(40))
    with pytest.raises(NonFiniteError):
        cache.append(0, {first: kv(40), second: huge})
    now = state(cache)
    assert now[0] == before[0]


# --- contents


def assert_equals_contiguous(cache, seq, twin):
    for layer in range(cache.geometry.num_layers):
        for side in ("k", "v"):
            stream = getattr(cache._sequence(seq).layers[layer], side)
            other = getattr(twin._layers[layer], side)
            assert (stream.length, stream.packed) == (other.length, other.packed)
            assert same_bytes(stream.tail, other.tail)
            assert (stream.sinks is None) == (other.sinks is None)
            assert stream.sinks is None or same_bytes(stream.sinks, other.sinks)
            pages = -(-stream.packed // cache.pool.page_size)
            segments = -(-stream.packed // other.store.segment_tokens)
            for field in stream.codec.fields if pages else ():
                ours = stream.store.source().gather(field.name, 0, pages).clone()
                theirs = other.store.source().gather(field.name, 0, segments).clone()
                for slots in (ours, theirs):  # what is shared may have another's tokens behind
                    field.clear_from(slots, other.packed)
                shared = min(ours.shape[2], theirs.shape[2])
                assert same_bytes(ours[:, :, :shared], theirs[:, :, :shared])
                assert not ours[:, :, shared:].any()


@pytest.mark.parametrize("spec", KINDS)
def test_slots_are_those_of_the_contiguous_cache(spec):
    """On pages of several groups; on the smallest ones the conformance kit checks it."""
    cache = PagedKVCache(spec, GEOMETRY, 24, 192)
    seqs = [cache.allocate() for _ in range(2)]
    twins = [create_cache(spec, GEOMETRY) for _ in seqs]
    for piece, counts in enumerate([(1, 70), (63, 1), (65, 33), (100, 2), (1, 130)]):
        tokens = {s: kv(n, 10 * piece + s) for s, n in zip(seqs, counts, strict=True)}
        for layer in range(2):
            cache.append(layer, tokens)
            for seq, twin in zip(seqs, twins, strict=True):
                k, v = tokens[seq]
                twin.prefill(layer, k[None], v[None])
        for seq, twin in zip(seqs, twins, strict=True):
            assert_equals_contiguous(cache, seq, twin)
    # A truncated and refilled sequence, and the fork that it was, each with its own twin.
    fork, other = cache.fork(seqs[0]), twins[0].fork()
    for kept, seed in ((200, 90), (67, 91), (64, 92), (3, 93)):
        cache.truncate(fork, kept)
        other.truncate(kept)
        fill(cache, fork, 40, seed)
        for layer in range(2):
            other.prefill(layer, *(x[None] for x in kv(40, seed)))
        assert_equals_contiguous(cache, fork, other)
        assert_equals_contiguous(cache, seqs[0], twins[0])


# --- tables


def test_tables_are_what_engines_read():
    cache = PagedKVCache("int:bits=4", GEOMETRY, 8)
    a, b, c = (cache.allocate() for _ in range(3))
    fill(cache, a, 70)
    fill(cache, b, 32)
    table = cache.block_table([a, b, c])
    assert table.dtype == torch.int32
    assert table.shape == (3, 3)
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


def test_layers_may_be_at_unlike_lengths():
    cache = PagedKVCache("int:bits=4", GEOMETRY, 10)
    seq = cache.allocate()
    for part in range(3):
        cache.append(0, {seq: kv(50, part)})
    fork = cache.fork(seq)  # before the other layer has any
    cache.append(1, {seq: kv(150, 7)})
    cache.append(1, {fork: kv(70, 8)})
    twin = create_cache("int:bits=4", GEOMETRY)
    for part in range(3):
        twin.prefill(0, *(x[None] for x in kv(50, part)))
    other = twin.fork()
    twin.prefill(1, *(x[None] for x in kv(150, 7)))
    other.prefill(1, *(x[None] for x in kv(70, 8)))
    assert_equals_contiguous(cache, seq, twin)
    assert_equals_contiguous(cache, fork, other)


# --- capacity


def test_beams_share_their_prompt():
    geometry = CacheGeometry(1, 1, 32)
    cache = PagedKVCache("turboquant:bits=4", geometry, 256)
    prompt = cache.allocate()
    fill(cache, prompt, 2000)
    alone = cache.fork(prompt)
    fill(cache, alone, 32)
    one = len(set(cache.block_table(alone).tolist()))
    cache.free(alone)
    beams = [cache.fork(prompt) for _ in range(7)] + [prompt]
    for step in range(32):
        cache.append(0, {beam: kv(1, step * 8 + i, 1, 32, 32) for i, beam in enumerate(beams)})
    used = cache.num_pages - cache.num_free_pages
    assert used < 1.3 * one
    for beam in beams:
        cache.free(beam)
    assert cache.num_free_pages == cache.num_pages


def test_capacity_at_equal_bytes():
    geometry = CacheGeometry(1, 2, 128, dtype=torch.float16)
    tokens = {}
    for spec in ("none:dtype=fp16", "turboquant:bits=4"):
        pool = PagedKVCache(spec, geometry, 8).pool
        held = sum(t.numel() * t.element_size() for t in pool.tensors())
        tokens[spec] = pool.num_pages * pool.page_size / held
    assert tokens["turboquant:bits=4"] >= 3.5 * tokens["none:dtype=fp16"]


def test_memory_is_taken_once():
    cache = PagedKVCache("turboquant:bits=4", GEOMETRY, 8)
    pool = [t.data_ptr() for t in cache.pool.tensors()]
    taken = cache.memory_usage()
    seq = cache.allocate()
    fill(cache, seq, 200)
    exact = sum(t.nbytes for layer in cache._sequence(seq).layers for t in layer.tensors())
    assert cache.memory_usage() == taken + exact
    assert [t.data_ptr() for t in cache.pool.tensors()] == pool
    assert cache.stats()["bytes"]["total"] == taken + exact
