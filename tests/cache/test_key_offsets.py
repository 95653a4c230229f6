"""Caches whose keys are stored without their offset: all that holds of others holds of them."""

from dataclasses import replace

import pytest
import torch
from tests.helpers import closeness
from tests.helpers.one_layer import kvq

import kvpact
from kvpact import AttendConfig, CacheGeometry, KeyOffset, PagedKVCache, PrefixCache, Snapshot
from kvpact.errors import DtypeError, FormatError, GeometryError, LayerIndexError, MismatchError
from kvpact.kernels import RowOffset
from kvpact.stores import MemoryStore
from kvpact.testing import CacheContract, PagedCacheContract, random_offset, same_bytes

GEOMETRY = CacheGeometry(1, 2, 64, dtype=torch.float32)
SPECS = ["turboquant:bits=4,sinks=2,window=9", "kivi:bits=4,sinks=3,window=40"]
OFFSET = random_offset(2, 64, norm=300, seed=2)


class _Offsets:
    spec = "turboquant:bits=4"

    def key_offsets(self, geometry):
        offset = random_offset(geometry.num_kv_heads, geometry.head_dim, seed=5)
        return dict.fromkeys(range(geometry.num_layers), offset)


class TestContiguous(_Offsets, CacheContract):
    pass


@pytest.mark.slow
class TestPaged(_Offsets, PagedCacheContract):
    pass


def pair(spec, **options):
    """A cache with the offset and one without, which are to hold the same keys but for it."""
    both = ({0: OFFSET}, None)
    return tuple(kvpact.create_cache(spec, GEOMETRY, key_offsets=o, **options) for o in both)


def with_offset(k, start=0, origin=None):
    return RowOffset(OFFSET, origin).put_back(k.clone(), start)


def close(cache, plain, origin=None):
    """Whether two caches hold the same, keys of one with the offset and of the other without."""
    k, bare = cache.dequantize(0, "k"), with_offset(plain.dequantize(0, "k"), 0, origin)
    # Sums with the offset are rounded to fp32, which decides on a few codes.
    assert (k - bare).norm() < 1e-3 * plain.dequantize(0, "k").norm()
    assert same_bytes(cache.dequantize(0, "v"), plain.dequantize(0, "v"))


def test_rows_count_positions_from_their_first_token_or_from_where_it_is_said():
    k, v, _ = kvq(200, batch=3, seed=5)
    padding = torch.tensor([0, 4, 9])
    for given, origin in ((None, (0, 4, 9)), ([0, 0, 0], (0, 0, 0)), ([-3, 1, 9], (-3, 1, 9))):
        cache, plain = pair(SPECS[0])
        config = AttendConfig(padding=padding, origin=given and torch.tensor(given))
        cache.prefill(0, with_offset(k, 0, origin), v, None, config)
        plain.prefill(0, k, v, None, AttendConfig(padding=padding))
        close(cache, plain, origin)
        for index in ([2, 0, 0], [1]):
            for one in (cache, plain):
                one.select(torch.tensor(index))
            origin = tuple(origin[i] for i in index)
            close(cache, plain, origin)
        again = pair(SPECS[0])[0]
        again.restore(cache.snapshot())
        close(again, plain, origin)
        cache.truncate(0)
        cache.prefill(0, with_offset(k)[:1], v[:1])
        plain.reset()
        plain.prefill(0, k[:1], v[:1])
        close(cache, plain)


def test_a_row_whose_first_call_was_padding_alone():
    k, v, _ = kvq(120, batch=2, seed=6)
    cache, plain = pair(SPECS[0])
    for one, keys in ((cache, with_offset(k, 0, (0, 40))), (plain, k)):
        for start, end in ((0, 32), (32, 64), (64, 120)):
            config = AttendConfig(padding=torch.tensor([0, min(end, 40)]))
            one.prefill(0, keys[:, :, start:end], v[:, :, start:end], None, config)
    shown, bare = cache.dequantize(0, "k"), with_offset(plain.dequantize(0, "k"), 0, (0, 40))
    assert (shown - bare)[1, :, 40:].norm() < 1e-3 * plain.dequantize(0, "k").norm()
    assert (shown - bare)[0].norm() < 1e-3 * plain.dequantize(0, "k").norm()


def test_pages_hold_the_same_bytes():
    k, v, q = kvq(150, batch=2, seed=7)
    k = with_offset(k)
    cache = pair(SPECS[0])[0]
    paged = kvpact.create_cache(SPECS[0], GEOMETRY, "paged", num_pages=20, key_offsets={0: OFFSET})
    for start, end in ((0, 90), (90, 91), (91, 150)):
        given = {name: x[:, :, start:end] for name, x in (("k", k), ("v", v), ("q", q))}
        one, other = (x.attend(0, **given) for x in (cache, paged))
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)
    a, b = cache.snapshot(), paged.snapshot()
    for name, slots in a.layer(0).streams[0].slots.items():
        assert same_bytes(slots, b.layer(0).streams[0].slots[name])
    again = kvpact.create_cache(SPECS[0], GEOMETRY, "paged", num_pages=20, key_offsets={0: OFFSET})
    again.restore(a)
    shown = again.cache.layer_of(again.seqs[1], 0).dequantize("k")
    assert same_bytes(shown, cache.dequantize(0, "k")[1:])


def test_exact_methods_keep_their_numbers():
    k, v, _ = kvq(100, seed=8)
    cache = kvpact.create_cache("none", GEOMETRY, key_offsets={0: OFFSET})
    cache.prefill(0, k, v)
    assert same_bytes(cache.dequantize(0, "k"), k)
    plain = kvpact.create_cache("none", GEOMETRY)
    plain.prefill(0, k, v)
    assert cache.snapshot().to_bytes() == plain.snapshot().to_bytes()


def test_snapshots_say_it_and_others_are_refused():
    k, v, _ = kvq(100, seed=8)
    cache, plain = pair(SPECS[0])
    for one in (cache, plain):
        one.prefill(0, k, v)
    assert not plain.snapshot().layer(0).streams[0].offset
    snapshot = cache.snapshot()
    held = snapshot.layer(0).streams[0].offset
    assert held.digest == OFFSET.digest
    assert snapshot.sizes()["key offsets"] > 0
    offset = random_offset(2, 64, norm=300, seed=9)
    other = kvpact.create_cache(SPECS[0], GEOMETRY, key_offsets={0: offset})
    for wrong, of in ((plain, snapshot), (other, snapshot), (cache, plain.snapshot())):
        before = None if wrong.seq_len() == 0 else wrong.snapshot().to_bytes()
        with pytest.raises(MismatchError, match="key_offsets"):
            wrong.restore(of)
        assert (None if wrong.seq_len() == 0 else wrong.snapshot().to_bytes()) == before
    halves = snapshot.slice(0, 64), snapshot.slice(64)
    again = pair(SPECS[0])[0]
    again.restore(Snapshot.join(halves))
    assert same_bytes(again.dequantize(0, "k"), cache.dequantize(0, "k"))


def test_a_damaged_offset_in_a_snapshot_is_refused():
    k, v, _ = kvq(40, seed=8)
    cache = pair(SPECS[0])[0]
    cache.prefill(0, k, v)
    state = cache.snapshot().layer(0)
    wrong = replace(state.streams[0], origin=(0, 0))
    with pytest.raises(FormatError, match="origin"):
        states = [replace(state, streams=(wrong, state.streams[1]))]
        shape = {"geometry": GEOMETRY, "layout": "contiguous", "page_size": 64}
        Snapshot.build(states, slots=1, **shape)


def test_prefixes_are_shared_by_caches_of_the_same_offset_alone():
    k, v, _ = kvq(128, seed=9)
    k, ids, store = with_offset(k), list(range(128)), MemoryStore()
    cache, plain = pair(SPECS[0])
    cache.prefill(0, k, v)
    assert PrefixCache(store, cache, model="m").save(ids) == 2
    assert PrefixCache(store, plain, model="m").load(ids) == 0
    again = pair(SPECS[0])[0]
    assert PrefixCache(store, again, model="m").load(ids) == 128
    offset = with_offset(torch.zeros_like(k))
    assert (again.dequantize(0, "k") - k).norm() < 0.2 * (k - offset).norm()
    paged = PagedKVCache(SPECS[0], GEOMETRY, 8, key_offsets={0: OFFSET})
    seq = paged.allocate()
    assert PrefixCache(store, paged, model="m").load(ids, seq=seq) == 128
    assert same_bytes(paged.layer_of(seq, 0).dequantize("k"), again.dequantize(0, "k"))
    away = pair(SPECS[0])[0]
    away.prefill(0, k, v, None, AttendConfig(origin=torch.tensor([-2])))
    with pytest.raises(GeometryError, match="position 0"):
        PrefixCache(store, away, model="m").save(ids)


def test_published_pages_are_shared():
    k, v, _ = kvq(96, seed=10)
    k, ids = with_offset(k), list(range(96))
    paged = PagedKVCache(SPECS[0], GEOMETRY, 12, key_offsets={0: OFFSET})
    seq = paged.allocate()
    paged.reserve([seq], 96)
    paged.append(0, {seq: (k[0], v[0])})
    paged.publish(seq, ids)
    other = paged.allocate([*ids, 5])
    assert paged.seq_len(other) == 96
    shown = paged.layer_of(other, 0).dequantize("k")
    bare = k - with_offset(torch.zeros_like(k))
    assert (shown - k).norm() < 0.2 * bare.norm()  # as a share of what is encoded


def test_what_learns_learns_from_keys_without_offset():
    k, v, _ = kvq(256, seed=11)
    spec = "vq:codebook_size=64,dims=2,sinks=0,window=0"
    known = {0: (with_offset(k), v)}
    cache = kvpact.create_cache(spec, GEOMETRY, key_offsets={0: OFFSET}, calibration=known)
    plain = kvpact.create_cache(spec, GEOMETRY, calibration={0: (k, v)})
    cache.prefill(0, with_offset(k), v)
    plain.prefill(0, k, v)
    pairs = ((cache, with_offset(k)), (plain, k))
    errors = [float((one.dequantize(0, "k") - keys).norm()) for one, keys in pairs]
    assert errors[0] < 1.01 * errors[1]


def test_the_compressor_takes_whole_keys():
    k, v, _ = kvq(128, seed=12)
    k = with_offset(k)
    paged = PagedKVCache(SPECS[0], GEOMETRY, 8, key_offsets={0: OFFSET})
    seq = paged.allocate()
    paged.reserve([seq], 128)
    paged.append(0, {seq: (k[0], v[0])})
    compressor = kvpact.KVCacheCompressor("int:bits=8")
    compressed = compressor.compress_paged_cache(paged, 0, seq)
    shown = paged.layer_of(seq, 0).dequantize("k")
    found = compressor.decompress_kv(compressed)[0]
    assert (found - shown[0]).norm() < 0.01 * shown.norm()
    other = paged.allocate()
    compressor.decompress_to_paged_cache(compressed, paged, 0, other)
    again = paged.layer_of(other, 0).dequantize("k")
    assert (again - shown).norm() < 0.02 * shown.norm()


def test_wrong_offsets_are_refused_by_name():
    def make(offsets, geometry=GEOMETRY, **options):
        return kvpact.create_cache("int:bits=4", geometry, key_offsets=offsets, **options)

    with pytest.raises(DtypeError, match="layer -> KeyOffset"):
        make([OFFSET])
    with pytest.raises(DtypeError, match="no KeyOffset"):
        make({0: 605.0})
    with pytest.raises(LayerIndexError):
        make({1: OFFSET})
    for geometry in (CacheGeometry(1, 3, 64), CacheGeometry(1, 2, 16)):
        with pytest.raises(GeometryError, match="KV heads"):
            make({0: OFFSET}, geometry)
    with pytest.raises(GeometryError, match="latents"):
        make({0: KeyOffset((1.0,), ((0, 1),), (((1.0, 0.0),),))}, CacheGeometry.mla(1, 64, 16))
    with pytest.raises(GeometryError, match="origin has shape"):
        k, v, _ = kvq(5)
        make({0: OFFSET}).prefill(0, k, v, None, AttendConfig(origin=torch.tensor([1, 2])))
    with pytest.raises(GeometryError, match="whole numbers"):
        AttendConfig(origin=torch.tensor([0.5]))


def test_steps_go_on_where_the_table_of_positions_ends():
    """The native kernels' table has 1,024 positions at first; padded rows begin elsewhere."""
    k, v, q = kvq(1100, batch=2, seed=13)
    k = with_offset(k, 0, (0, 3))
    config = AttendConfig(padding=torch.tensor([0, 3]))
    caches = [pair(SPECS[0], backend=backend)[0] for backend in ("auto", "torch")]
    for cache in caches:
        cache.prefill(0, k[:, :, :1010], v[:, :, :1010], None, config)
    for t in range(1010, 1100):
        given = {name: x[:, :, t : t + 1] for name, x in (("k", k), ("v", v), ("q", q))}
        one, other = (x.attend(0, **given) for x in caches)
        assert closeness.error(other, one) <= closeness.WHOLE_BOUND
    one, other = (cache.snapshot().layer(0).streams[0].slots for cache in caches)
    assert all(same_bytes(one[name], other[name]) for name in one)


def test_rows_that_are_selected_from_a_snapshot_keep_what_stands_at_position_0():
    k, v, _ = kvq(100, batch=3, seed=14)
    cache = kvpact.create_cache(SPECS[0], GEOMETRY, key_offsets={0: OFFSET})
    cache.prefill(0, k, v, None, AttendConfig(padding=torch.tensor([0, 3, 7])))
    selected = cache.snapshot().select([2, 0, 2])
    assert selected.layer(0).streams[0].origin == (7, 0, 7)
    cache.select(torch.tensor([2, 0, 2]))
    assert selected.digest == cache.snapshot().digest
