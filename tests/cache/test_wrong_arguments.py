"""Wrong arguments are refused by name, before anything changes."""

from __future__ import annotations

import warnings

import pytest
import torch

from kvpact import AttendConfig, CacheGeometry, create_cache
from kvpact.errors import DeviceError, DtypeError, KVPactError, NonFiniteError

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
        assert isinstance(told.value, KVPactError)
        assert held(cache) == before


def packed(kind):
    x = tokens(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return {
            "sparse": x.to_sparse,
            "mkldnn": x.to_mkldnn,
            "nested": lambda: torch.nested.nested_tensor([x[0]]),
            "jagged": lambda: torch.nested.nested_tensor([x[0]], layout=torch.jagged),
        }[kind]()


@pytest.mark.parametrize("name", ["k", "v", "q"])
@pytest.mark.parametrize("kind", ["sparse", "mkldnn", "nested", "jagged"])
def test_tensors_that_are_not_dense_are_refused_by_name(cache, kind, name):
    refused(cache, DtypeError, f"{name} is a .*; make it dense", **{name: packed(kind)})


@pytest.mark.parametrize("kind", ["sparse", "mkldnn", "nested", "jagged"])
def test_pages_refuse_to_append_tensors_that_are_not_dense(kind):
    cache = create_cache("int:bits=8", GEOMETRY, "paged", num_pages=8).cache
    seq = cache.allocate()
    with pytest.raises(DtypeError, match=r"k is a .*; make it dense"):
        cache.append(0, {seq: (packed(kind)[0] if kind == "sparse" else packed(kind), tokens(1))})


@pytest.mark.parametrize("config", [{}, {"mask": None}, "causal", 0, False])
def test_a_config_is_an_attend_config_or_none(cache, config):
    refused(cache, DtypeError, "config should be an AttendConfig", config=config)
    for call in (cache.prefill, cache.decode):
        with pytest.raises(DtypeError, match="config should be an AttendConfig"):
            call(0, tokens(1), tokens(1), tokens(1, 4), config)


@pytest.mark.parametrize("number", [3e38, -3e38, 2e31])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_queries_of_which_attention_makes_nan_are_refused(cache, number, dtype):
    q = tokens(1, 4).to(dtype)
    q[0, 3, 0, 7] = number
    refused(cache, NonFiniteError, "q holds NaN or infinity, or 1e\\+31 and more", q=q)
    attend(cache, q=torch.full((1, 4, 1, 64), 1e30))


@pytest.mark.parametrize("name", ["mask", "sink_logits", "padding", "origin"])
def test_meta_sparse_and_nested_tensors_of_a_config_are_refused(name):
    x = torch.zeros(4, dtype=torch.int64 if name in ("padding", "origin") else torch.float32)
    for wrong, error in (
        (x.to("meta"), DeviceError),
        (x.to_sparse(), DtypeError),
        ([0], DtypeError),
    ):
        with pytest.raises(error, match=name):
            AttendConfig(**{name: wrong})


@pytest.mark.parametrize("name", ["mask", "sink_logits"])
def test_masks_and_sinks_of_which_attention_makes_nan_are_refused(name):
    for number in (torch.inf, torch.nan, 3e38):
        with pytest.raises(NonFiniteError, match=f"{name} holds NaN, or 1e\\+31 and more"):
            AttendConfig(**{name: torch.tensor([0.0, number])})
    with pytest.raises(DtypeError, match=rf"{name} is torch.float8_e4m3fn; cast it"):
        AttendConfig(**{name: torch.zeros(2).to(torch.float8_e4m3fn)})
    AttendConfig(**{name: torch.tensor([0.0, -torch.inf])})
