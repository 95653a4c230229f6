"""Attention over a prompt, new tokens without a past: the native kernels give the torch body's."""

from __future__ import annotations

import pytest
import torch
from compare import BOUND, both, check_guards, error, guarded_output
from hypothesis import given, settings
from hypothesis import strategies as st
from rows_compare import latents

from kvpact import CacheGeometry, create_cache
from kvpact.errors import GeometryError
from kvpact.kernels.cpu import attend as native
from kvpact.kernels.cpu.library import _load

pytestmark = pytest.mark.skipif(isinstance(_load(), str), reason=f"native kernels: {_load()}")


@pytest.fixture(autouse=True)
def guards(monkeypatch):
    monkeypatch.setattr(native, "new_output", guarded_output)


def same(make=both, bound=BOUND, **case):
    expected, found, calls = make("turboquant:bits=4", held=0, **case)
    assert calls == {"cpu": 1}
    check_guards()
    assert error(expected, found) <= bound


@pytest.mark.parametrize("new", (1, 5, 6, 15, 16, 17, 31, 33, 127, 129, 255, 257, 600))
@pytest.mark.parametrize("dim", (64, 36))
def test_every_length(new, dim):
    same(new=new, dim=dim)


@pytest.mark.parametrize("groups", (1, 2, 4, 5))
@pytest.mark.parametrize("shape", ((16, 16), (128, 128), (80, 256), (100, 3), (5, 33)))
def test_every_shape(groups, shape):
    same(new=137, batch=2, groups=groups, dim=shape[0], value_dim=shape[1])


RULES = (
    {"sliding_window": 1},
    {"sliding_window": 17},
    {"sliding_window": 130},
    {"softcap": 1.5},
    {"softmax_scale": 0.5},
    {"is_causal": False},
    {"padding": torch.tensor([0, 140])},
    {"sink_logits": torch.linspace(-2, 4, 6)},
    {"mask": torch.arange(300) % 3 > 0},
    {"mask": torch.linspace(-3, 3, 300)},
    {"mask": torch.where(torch.arange(300) % 2 == 0, 0.0, -torch.inf).bfloat16()},
)


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_every_rule(rule):
    if "mask" in rule:
        rule = {"mask": rule["mask"].expand(1, 1, 300, 300)}
    same(new=300, batch=2, **rule)
    same(new=300, batch=2, **{**rule, "sliding_window": 40, "is_causal": False})
    if "sink_logits" not in rule:
        same(latents, new=300, batch=2, rank=64, rope=16, **rule)


def test_a_query_that_sees_nothing_gets_zeros():
    mask = torch.ones(1, 1, 50, 50, dtype=torch.bool)
    mask[:, :, 3] = False
    expected, found, _ = both("turboquant:bits=4", held=0, new=50, mask=mask)
    assert (found[:, :, 3] == 0).all() and error(expected, found) <= BOUND


@pytest.mark.parametrize("dtype", (torch.float16, torch.bfloat16))
def test_half_precision(dtype):
    expected, found, calls = both("turboquant:bits=4", held=0, new=90, dtype=dtype)
    assert calls == {"cpu": 1}
    assert error(expected, found) <= torch.finfo(dtype).eps / 4


@pytest.mark.parametrize("layout", ("contiguous", "paged"))
def test_inputs_without_alignment_or_in_other_orders(layout):
    def odd(x):
        batch, heads, tokens, dim = x.shape
        wide = torch.full((batch, tokens, heads, dim + 3), torch.nan, dtype=x.dtype)
        view = wide.transpose(1, 2)[..., 1 : dim + 1]
        view.copy_(x)
        return view

    expected, found, calls = both(
        "turboquant:bits=4", held=0, new=77, batch=2, change=odd, layout=layout
    )
    assert set(calls) == {"cpu"} and error(expected, found) <= BOUND
    same(new=77, change=lambda x: x.mT.contiguous().mT)


@pytest.mark.parametrize("new", (1, 40, 150))
def test_latents(new):
    same(latents, new=new, q_heads=5, rank=96, rope=20)


def test_heads_and_masks_that_do_not_fit_leave_the_cache_empty():
    cache = create_cache("turboquant:bits=4", CacheGeometry(1, 2, 32), backend="cpu")
    k = torch.zeros(1, 2, 5, 32)
    with pytest.raises(GeometryError, match="heads"):
        cache.attend(0, k, k, torch.zeros(1, 5, 5, 32))
    assert cache.seq_len(0) == 0


def test_a_width_that_is_not_covered_is_torchs():
    expected, found, calls = both("none", held=0, new=9, dim=1040, backend="auto")
    assert calls == {"torch": 1}
    assert torch.equal(expected, found)


@settings(max_examples=200, deadline=None)
@given(
    heads=st.integers(1, 3),
    groups=st.integers(1, 5),
    dim=st.sampled_from((8, 16, 48, 64, 100)),
    value_dim=st.sampled_from((8, 16, 48, 64, 100)),
    new=st.integers(1, 300),
    batch=st.integers(1, 2),
    seed=st.integers(0, 1000),
    sliding_window=st.none() | st.integers(1, 300),
    softcap=st.none() | st.floats(0.5, 50),
    is_causal=st.booleans(),
)
def test_random_cases(**case):
    same(bound=2 * BOUND, **case)
