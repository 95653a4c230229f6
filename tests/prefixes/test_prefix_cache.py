"""Prefixes: what is loaded is what was saved, whoever extends it, in every layout."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvpact import AttendConfig, MLACache, PrefixCache, create_cache, list_methods
from kvpact.errors import CacheFull, DtypeError, GeometryError, MismatchError, SpecError
from kvpact.geometry import CacheGeometry
from kvpact.registry import Alias
from kvpact.stores import MemoryStore

from .conftest import GEOMETRY, calibration, fill, prefix

METHODS = [name for name, method in list_methods().items() if not isinstance(method, Alias)]
LEARN = ("lowrank:rank=8", "vq:codebook_size=16", "hybrid:rank=8", "trellis:bits=3", "pca:bits=2")
SPECS = [*LEARN, *(n for n in METHODS if n not in [spec.partition(":")[0] for spec in LEARN])]


def state(cache, seq=None):
    return (cache.snapshot() if seq is None else cache.snapshot(seq)).select([0]).digest


@pytest.mark.parametrize("name", SPECS)
def test_a_loaded_prefix_is_a_slice_of_what_was_saved(store, make, ids, name):
    fitted = calibration() if name in LEARN else None
    source = fill(make(name, fitted=fitted), ids)
    assert prefix(store, source).save(ids) == 4
    loaded, other = make(name, fitted=fitted), make(name, fitted=fitted)
    prefixes = prefix(store, loaded)
    assert prefixes.match(ids) == prefixes.load(ids) == 256
    assert loaded.seq_len(0) == loaded.seq_len(1) == 256
    other.restore(source.snapshot(page_size=64).slice(0, 256))
    assert state(loaded) == state(other)


@pytest.mark.parametrize("layout", ["contiguous", "paged", "view", "latent"])
@pytest.mark.parametrize("spec", ["turboquant:bits=4,window=16", "kivi:bits=2,sinks=3"])
def test_layouts(store, make, ids, layout, spec):
    source, loaded, other = (make(spec, layout) for _ in range(3))
    seqs = [cache.allocate() if layout == "paged" else None for cache in (source, loaded, other)]
    fill(source, ids, seq=seqs[0])
    assert prefix(store, source).save(ids, seq=seqs[0]) == 4
    assert prefix(store, loaded).load(ids, seq=seqs[1]) == 256
    whole = source.snapshot(*seqs[:1] if layout == "paged" else (), page_size=64)
    other.restore(whole.slice(0, 256), **({"seq": seqs[2]} if layout == "paged" else {}))
    assert state(loaded, seqs[1]) == state(other, seqs[2])
    # It goes on as the cache that it was taken from: new tokens are stored alike.
    fill(loaded, ids, start=256, seq=seqs[1])
    fill(other, ids, start=256, seq=seqs[2])
    assert state(loaded, seqs[1]) == state(other, seqs[2])


@pytest.mark.parametrize(("one", "two"), [("contiguous", "paged"), ("view", "contiguous")])
def test_layouts_share_entries(store, make, ids, one, two):
    prefix(store, fill(make("kvarn:bits=4", one), ids)).save(ids)
    target = make("kvarn:bits=4", two)
    seq = target.allocate() if two == "paged" else None
    assert prefix(store, target).load(ids, seq=seq) == 256


def test_a_chat_writes_only_its_new_chunks(store, make, ids):
    cache, written = make("turboquant:bits=4"), []
    for end in (100, 150, 150, 200, 300):
        fill(cache, ids[:end], start=cache.seq_len(0)) if cache.seq_len(0) < end else None
        written.append(prefix(store, cache).save(ids[:end]))
    assert written == [1, 1, 0, 1, 1]
    assert len(store) == 4
    sizes = [len(store.get(key)) for key in prefix(store, cache).keys(ids)]
    assert max(sizes[1:]) < sizes[0] < 1.6 * sizes[1], "the first chunk alone has the sinks"


def test_branches_share_what_they_have_in_common(store, make, ids):
    first = fill(make("int:bits=4"), ids)
    prefix(store, first).save(ids)
    branch = ids[:200] + [7] * 100
    second = make("int:bits=4")
    prefixes = prefix(store, second)
    assert prefixes.match(branch) == prefixes.load(branch) == 192
    fill(second, branch, start=192)
    assert prefixes.save(branch) == 1
    assert len(store) == 5
    assert prefix(store, make("int:bits=4")).match(ids) == 256


def test_sinks_of_several_chunks_stay_with_their_tokens(store, make, ids):
    """A chunk is shared by all that begin like it; so it must not hold later tokens' sinks."""
    spec = "turboquant:bits=4,sinks=100,window=0"
    prefix(store, fill(make(spec), ids)).save(ids)
    branch = ids[:80] + [9] * 120
    loaded = make(spec)
    assert prefix(store, loaded).load(branch) == 64
    sinks = loaded.entry(0).k.sinks
    assert torch.equal(sinks[:, :, 64:], torch.zeros(1, 2, 36, 32))
    fill(loaded, branch, start=64)
    fresh = fill(make(spec), branch)
    assert torch.equal(loaded.entry(1).k.sinks, fresh.entry(1).k.sinks)
    whole = make(spec)
    assert prefix(store, whole).load(ids) == 256
    assert torch.equal(whole.entry(0).v.sinks, fill(make(spec), ids).entry(0).v.sinks)


@pytest.mark.parametrize(("spec", "chunk", "least"), [
    ("turboquant:bits=3,center=64", 64, 64), ("turboquant:bits=3,center=128", 128, 128),
    ("int:bits=8", 64, 32),
])  # fmt: skip
def test_chunks_are_whole_groups(store, make, ids, spec, chunk, least):
    cache = fill(make(spec), ids)
    prefixes = prefix(store, cache)
    assert prefixes.chunk == chunk and chunk % least == 0
    assert prefixes.save(ids) == 256 // chunk
    with pytest.raises(GeometryError, match=f"multiple of {least}"):
        prefix(store, cache, chunk=least // 2)
    wide = prefix(store, cache, chunk=2 * chunk)
    assert wide.match(ids) == 0, "other chunks, other keys"
    assert wide.save(ids) == 256 // (2 * chunk)


def test_other_dtypes_shapes_and_names_that_could_be_confused_have_other_keys(store, ids):
    def first(geometry=GEOMETRY, spec="int:bits=4", **options):
        return prefix(store, create_cache(spec, geometry), **options).keys(ids)[0]

    keys = [
        first(), first(CacheGeometry(2, 2, 32, 16, torch.float16)),
        first(CacheGeometry(3, 2, 32, 16, torch.float32)),
        first(CacheGeometry(2, 1, 32, 16, torch.float32)), first(spec="int:bits=8"),
        first(spec="int:bits=4,sinks=8"), first(model="two"), first(adapter="b", tenant="c"),
        first(adapter="bc"), first(tenant="bc"), first(adapter="c", tenant="b"),
        first(model="a model", adapter='b", "tenant": "c'), first(chunk=128),
    ]  # fmt: skip
    assert len(set(keys)) == len(keys)
    assert first() == keys[0]


@pytest.mark.parametrize("name", LEARN)
def test_methods_that_learn_share_only_what_learnt_the_same(store, make, ids, name):
    with pytest.raises(SpecError, match="not fitted"):
        prefix(store, make(name))
    source = fill(make(name, fitted=calibration()), ids)
    assert prefix(store, source).save(ids) == 4
    assert prefix(store, make(name, fitted=calibration(seed=1))).match(ids) == 0
    paged = make(name, "paged", fitted=calibration())
    assert prefix(store, paged).load(ids, seq=paged.allocate()) == 256


def test_a_cache_restored_from_other_codecs_saves_nothing(store, make, ids):
    """A restore brings the snapshot's codebooks along; the key speaks of the calibration's."""
    other = fill(make("vq:codebook_size=16", fitted=calibration(seed=1)), ids)
    cache = make("vq:codebook_size=16", fitted=calibration())
    cache.restore(other.snapshot())
    with pytest.raises(MismatchError, match="learnt something else"):
        prefix(store, cache).save(ids)
    assert len(store) == 0


def test_what_is_refused_changes_nothing(store, make, ids):
    cache = fill(make("int:bits=4"), ids)
    prefixes = prefix(store, cache)
    for few in ([], ids[:256], ids[:299], [*ids, 1, 2]):
        with pytest.raises(GeometryError, match=f"{len(few)} token ids, but the cache holds 300"):
            prefixes.save(few)
    with pytest.raises(GeometryError, match="empty cache"):
        prefixes.load(ids)
    with pytest.raises(GeometryError, match=r"\[T\] or \[1, T\]"):
        prefixes.save(torch.ones(2, 10, dtype=torch.long))
    with pytest.raises(GeometryError, match="whole numbers"):
        prefixes.match([1.5] * 64)
    with pytest.raises(MismatchError, match="name the model"):
        PrefixCache(store, cache, model="")
    with pytest.raises(DtypeError, match="has a dtype"):
        prefix(store, create_cache("none", CacheGeometry(1, 1, 8)))
    assert len(store) == 0 and cache.seq_len(0) == 300
    rows = create_cache("int:bits=4", GEOMETRY)
    for layer in range(2):
        rows.store(layer, k=torch.zeros(2, 2, 70, 32), v=torch.zeros(2, 2, 70, 16))
    with pytest.raises(GeometryError, match="one row"):
        prefix(store, rows).save(ids[:70])


def test_padding_is_refused(store, ids):
    cache = create_cache("int:bits=4", GEOMETRY)
    for layer in range(2):
        k, v = torch.zeros(1, 2, 70, 32), torch.zeros(1, 2, 70, 16)
        cache.store(layer, k=k, v=v, config=AttendConfig(padding=torch.tensor([5])))
    with pytest.raises(GeometryError, match="without padding"):
        prefix(store, cache).save(ids[:70])


def test_no_room_for_a_prefix_leaves_the_cache_as_it_was(store, make, ids):
    prefix(store, fill(make("int:bits=4"), ids)).save(ids)
    small = create_cache("int:bits=4", GEOMETRY, max_tokens=200)
    with pytest.raises(CacheFull):
        prefix(store, small).load(ids)
    assert small.seq_len(0) == 0


def test_open_groups_and_what_is_not_packed_stay_unsaved(store, make, ids):
    cache = fill(make("turboquant:bits=3,center=64"), ids[:127])
    assert prefix(store, cache).save(ids[:127]) == 1
    assert prefix(store, fill(make("turboquant:bits=3,center=64"), ids[:63])).save(ids[:63]) == 0


def test_the_last_token_generated_need_not_be_held(store, make, ids):
    assert prefix(store, fill(make("int:bits=4,window=0"), ids[:127])).save(ids[:128]) == 1
    assert prefix(store, make("int:bits=4,window=0")).match(ids) == 64


TREES = st.lists(st.lists(st.integers(0, 2), min_size=0, max_size=5), min_size=1, max_size=8)


@settings(max_examples=25, deadline=None)
@given(TREES, st.lists(st.integers(0, 2), max_size=5))
def test_match_is_the_longest_common_prefix_of_chunks(paths, wanted):
    """Sequences are paths in a tree of chunks; a set of paths is the oracle."""
    store, geometry = MemoryStore(), CacheGeometry(1, 1, 8, dtype=torch.float32)
    known = {()}
    for path in [*paths]:
        cache = create_cache("int:bits=8", geometry)
        tokens = [n for n in path for _ in range(32)] + [5] * 3
        fill(cache, tokens)
        new = {tuple(path[: i + 1]) for i in range(len(path))}
        assert prefix(store, cache, chunk=32).save(tokens) == len(new - known)
        known |= new
    tokens = [n for n in wanted for _ in range(32)]
    longest = max(i for i in range(len(wanted) + 1) if tuple(wanted[:i]) in known)
    prefixes = prefix(store, create_cache("int:bits=8", geometry), chunk=32)
    assert prefixes.match(tokens) == prefixes.load(tokens) == 32 * longest


def test_mla_caches_and_plain_ones_of_equal_shape_have_other_keys(store, ids):
    latent = MLACache("none", 2, 32, 16, dtype=torch.float32)
    plain = create_cache("none", CacheGeometry(2, 1, 32, 16, torch.float32))
    assert prefix(store, latent).keys(ids)[0] != prefix(store, plain).keys(ids)[0]
