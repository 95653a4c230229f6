"""Wrong arguments are refused by name, before anything changes."""

import warnings
from functools import partial

import pytest
import torch

from kvpact import AttendConfig, CacheGeometry, PagedKVCache, create_cache, errors
from kvpact.cache.paged.view import PagedView

GEOMETRY = CacheGeometry(1, 2, 64)


@pytest.fixture(params=["contiguous", "paged"])
def cache(request):
    more = {"num_pages": 8} if request.param == "paged" else {}
    return create_cache("int:bits=8", GEOMETRY, request.param, **more)


def tokens(count, heads=2):
    return torch.randn(1, heads, count, 64, generator=torch.Generator().manual_seed(count))


def attend(cache, count=1, **changed):
    given = {"k": tokens(count), "v": tokens(count), "q": tokens(count, 4), **changed}
    return cache.attend(0, **given)


def held(cache):
    return cache.seq_len(0), cache.snapshot().to_bytes() if cache.seq_len(0) else b""


def refused(cache, error, match, **changed):
    """Refused as the first call, as a step of the ordinary way, and as one in one native call."""
    for steps in (0, 1, 3):
        for _ in range(steps):
            attend(cache)
        before = held(cache)
        with pytest.raises(error, match=match) as told:
            attend(cache, **changed)
        assert isinstance(told.value, errors.KVPactError)
        assert held(cache) == before


def packed(kind):
    x = tokens(1)
    with warnings.catch_warnings(action="ignore"):
        return {
            "sparse": x.to_sparse,
            "mkldnn": x.to_mkldnn,
            "nested": lambda: torch.nested.nested_tensor([x[0]]),
            "jagged": lambda: torch.nested.nested_tensor([x[0]], layout=torch.jagged),
        }[kind]()


@pytest.mark.parametrize("name", ["k", "v", "q"])
@pytest.mark.parametrize("kind", ["sparse", "mkldnn", "nested", "jagged"])
def test_tensors_that_are_not_dense_are_refused_by_name(cache, kind, name):
    refused(cache, errors.DtypeError, f"{name} is a .*; make it dense", **{name: packed(kind)})


@pytest.mark.parametrize("kind", ["sparse", "mkldnn", "nested", "jagged"])
def test_pages_refuse_to_append_tensors_that_are_not_dense(kind):
    cache = create_cache("int:bits=8", GEOMETRY, "paged", num_pages=8).cache
    seq = cache.allocate()
    with pytest.raises(errors.DtypeError, match=r"k is a .*; make it dense"):
        cache.append(0, {seq: (packed(kind)[0] if kind == "sparse" else packed(kind), tokens(1))})


@pytest.mark.parametrize("config", [{}, {"mask": None}, "causal", 0, False])
def test_a_config_is_an_attend_config_or_none(cache, config):
    refused(cache, errors.DtypeError, "config should be an AttendConfig", config=config)
    for call in (cache.prefill, cache.decode):
        with pytest.raises(errors.DtypeError, match="config should be an AttendConfig"):
            call(0, tokens(1), tokens(1), tokens(1, 4), config)


@pytest.mark.parametrize("number", [3e38, -3e38, 2e31])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_queries_of_which_attention_makes_nan_are_refused(cache, number, dtype):
    q = tokens(1, 4).to(dtype)
    q[0, 3, 0, 7] = number
    refused(cache, errors.NonFiniteError, "q holds NaN or infinity, or 1e\\+31 and more", q=q)
    attend(cache, q=torch.full((1, 4, 1, 64), 1e30))


@pytest.mark.parametrize("name", ["mask", "sink_logits", "padding", "origin"])
def test_meta_sparse_and_nested_tensors_of_a_config_are_refused(name):
    x = torch.zeros(4, dtype=torch.int64 if name in ("padding", "origin") else torch.float32)
    for wrong, error in (
        (x.to("meta"), errors.DeviceError),
        (x.to_sparse(), errors.DtypeError),
        ([0], errors.DtypeError),
    ):
        with pytest.raises(error, match=name):
            AttendConfig(**{name: wrong})


@pytest.mark.parametrize("name", ["mask", "sink_logits"])
def test_masks_and_sinks_of_which_attention_makes_nan_are_refused(name):
    for number in (torch.inf, torch.nan, 3e38):
        with pytest.raises(errors.NonFiniteError, match=f"{name} holds NaN, or 1e\\+31 and more"):
            AttendConfig(**{name: torch.tensor([0.0, number])})
    with pytest.raises(errors.DtypeError, match=rf"{name} is torch.float8_e4m3fn; cast it"):
        AttendConfig(**{name: torch.zeros(2).to(torch.float8_e4m3fn)})
    AttendConfig(**{name: torch.tensor([0.0, -torch.inf])})


@pytest.mark.parametrize("tokens", ["3", 1.5, True, None, -1, 1 << 63])
def test_room_is_a_whole_number(cache, tokens):
    attend(cache)
    paged = isinstance(cache, PagedView)
    room = partial(cache.cache.reserve, cache.seqs) if paged else cache.reserve
    with pytest.raises(errors.GeometryError, match="tokens should be a whole number from 0 on"):
        room(tokens)
    with pytest.raises(errors.GeometryError, match="repeats should be a whole number from 1 on"):
        cache.repeat(0 if tokens is True else tokens)
    assert cache.seq_len(0) == 1


@pytest.mark.parametrize("spec", ["int:bits=4,window=16,sinks=4", "kivi:bits=2", "none"])
def test_room_that_no_memory_has_is_refused_before_any_is_taken(spec):
    cache = create_cache(spec, GEOMETRY)
    attend(cache, 40)
    used = cache.memory_usage()
    for tokens in (1 << 40, (1 << 63) - 1):
        with pytest.raises(errors.CacheFull, match=r"no memory for .* more tokens"):
            cache.reserve(tokens)
    assert cache.memory_usage() == used
    cache.reserve(300)
    assert cache.memory_usage() > used


def test_memory_that_runs_out_while_room_is_made_is_told_by_name(monkeypatch):
    cache = create_cache("int:bits=8", GEOMETRY)
    attend(cache, 40)
    before = held(cache)

    def full(*args, **kwargs):
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory")

    monkeypatch.setattr(torch, "zeros", full)
    with pytest.raises(errors.CacheFull, match="no memory for 10,000,000 more tokens"):
        cache.reserve(10**7)
    monkeypatch.undo()
    assert held(cache) == before


def test_more_rows_than_memory_has_are_refused(cache):
    attend(cache)
    before = held(cache)
    with pytest.raises(errors.CacheFull, match="no memory for every row 1,099,511,627,776 times"):
        cache.repeat(1 << 40)
    assert held(cache) == before


def test_more_pages_than_memory_has_are_refused():
    for pages, size in ((1 << 60, None), (1 << 34, None), (2, 1 << 60)):
        with pytest.raises(errors.CacheFull, match=r"no memory for .* pages"):
            PagedKVCache("int:bits=8", GEOMETRY, pages, size)
    for pages, size in ((1 << 70, None), (True, None), (2, "64"), (2, 0)):
        with pytest.raises(errors.GeometryError, match="should be a whole number from 1 on"):
            PagedKVCache("int:bits=8", GEOMETRY, pages, size)
    with pytest.raises(errors.GeometryError, match="count should be a whole number"):
        PagedKVCache("int:bits=8", GEOMETRY, 2).allocate_rows("2")


def test_token_ids_may_be_a_tensor():
    cache = PagedKVCache("int:bits=8", GEOMETRY, 8)
    ids = torch.arange(70)
    first = cache.allocate(ids)
    cache.append(0, {first: (tokens(70)[0], tokens(70)[0])})
    assert cache.publish(first, ids) == 2
    for known in (ids[:64], ids[:64].tolist(), ids[:65], ids[:65].tolist()):
        assert cache.seq_len(cache.allocate(known)) == (len(known) - 1) // 32 * 32
    for wrong in (5, 1.5, torch.zeros(70), torch.zeros(2, 70, dtype=torch.int64)):
        with pytest.raises(errors.GeometryError, match="token ids should be whole numbers"):
            cache.allocate(wrong)


def test_no_geometry_and_no_snapshot_are_told_by_name(cache):
    for geometry in (None, {}, (1, 2, 64)):
        for layout in ({}, {"layout": "paged", "num_pages": 2}):
            with pytest.raises(errors.GeometryError, match="geometry should be a CacheGeometry"):
                create_cache("int:bits=8", geometry, **layout)
    attend(cache)
    before = held(cache)
    for wrong in (None, before[1], 5):
        with pytest.raises(errors.DtypeError, match="a Snapshot is wanted"):
            cache.restore(wrong)
    assert held(cache) == before
