"""Attention by the native kernel for many query rows is the torch bodies', over K and V and over
latents, at every shape, format and SIMD level."""

from __future__ import annotations

import pytest
import torch
from compare import BOUND, FORMATS, both, check_guards, error, guarded_output, random_tokens
from hypothesis import given, settings
from hypothesis import strategies as st
from rows_compare import LATENT_FORMATS, latents
from simd_levels import at_level

from kvpact import AttendConfig, CacheGeometry, MLACache, create_cache
from kvpact.errors import GeometryError, KVPactError
from kvpact.kernels.cpu import LEVELS, library
from kvpact.kernels.cpu import attend as native
from kvpact.kernels.cpu.library import _load

pytestmark = pytest.mark.skipif(isinstance(_load(), str), reason=f"native kernels: {_load()}")


@pytest.fixture(autouse=True)
def many_rows_always(monkeypatch):
    monkeypatch.setattr(native, "new_output", guarded_output)
    monkeypatch.setattr(native, "MANY_ROWS", 1)


def same(make=both, bound=BOUND, **case):
    expected, found, calls = make(**case)
    assert calls == {"cpu": 1}
    check_guards()
    assert error(expected, found) <= bound


@pytest.mark.parametrize("spec", FORMATS)
def test_every_format(spec):
    same(spec=spec, groups=4, dim=64, held=333, new=17)
    same(spec=spec, groups=1, dim=80, held=128, new=33, seed=1)
    same(spec=spec, groups=3, dim=36, value_dim=100, held=70, new=1, batch=2)


@pytest.mark.parametrize("dim", (16, 36, 64, 80, 96, 128, 256, 576))
@pytest.mark.parametrize("spec", ("turboquant:bits=4", "kivi:bits=3,group=64", "int:bits=8", "fp8"))
def test_every_width(spec, dim):
    same(spec=spec, dim=dim, held=200, new=17)


@pytest.mark.parametrize("new", (17, 33, 130))
@pytest.mark.parametrize("held", (1, 31, 33, 300))
@pytest.mark.parametrize("exact", ("", ",window=0,sinks=0", ",window=1,sinks=3"))
def test_every_length(held, new, exact):
    same(spec=f"turboquant:bits=4{exact}", held=held, new=new)


@pytest.mark.parametrize("groups", (1, 3, 4, 8))
@pytest.mark.parametrize("new", (1, 3, 17, 90))
def test_every_number_of_rows(groups, new):
    """Down to one row, and more than one task's."""
    same(spec="turboquant:bits=4", groups=groups, new=new, batch=2)


def test_more_rows_than_a_task_takes():
    same(spec="turboquant:bits=4", heads=1, groups=8, new=150, held=400)
    same(latents, spec="turboquant:bits=4", q_heads=32, new=40, held=200)


@pytest.mark.parametrize("spec", ("turboquant:bits=4", "kivi:bits=4", "kvarn:bits=4"))
@pytest.mark.parametrize("value", ("turboquant:bits=4,window=3", "kivi:bits=2,group=128", "fp8"))
def test_k_and_v_that_end_at_unlike_tokens(spec, value):
    """Groups of 32, 64 and 128 tokens, and none: what is packed in K may be exact in V."""
    for held in (129, 190, 300):
        same(spec=f"{spec}/{value}", held=held, new=20)


RULES = (
    {"sliding_window": 1},
    {"sliding_window": 40},
    {"sliding_window": 250},
    {"softcap": 1.5},
    {"softmax_scale": 0.5},
    {"is_causal": False},
    {"exact_new": False},
    {"padding": torch.tensor([0, 140])},
    {"mask": torch.arange(330) % 3 > 0},
    {"mask": torch.linspace(-3, 3, 330)},
    {"mask": torch.where(torch.arange(330) % 2 == 0, 0.0, torch.finfo(torch.float32).min)},
    {"mask": torch.where(torch.arange(330) % 2 == 0, 0.0, -torch.inf).bfloat16()},
)


@pytest.mark.parametrize("config", RULES, ids=str)
def test_every_rule(config):
    if "mask" in config:
        config = {**config, "mask": config["mask"].expand(1, 1, 30, 330)}
    same(spec="turboquant:bits=4", new=30, batch=2, **config)
    same(latents, spec="turboquant:bits=4", new=30, batch=2, rank=64, rope=16, **config)


def test_logits_without_a_token():
    same(spec="turboquant:bits=4", new=30, sink_logits=torch.linspace(-2, 4, 6))
    same(latents, spec="int:bits=4", new=3, sink_logits=torch.linspace(-2, 4, 16))


def test_a_query_that_sees_nothing_gets_zeros():
    mask = torch.ones(1, 1, 20, 320, dtype=torch.bool)
    mask[:, :, 3] = False
    expected, found, _ = both("turboquant:bits=4", mask=mask, new=20)
    assert (found[:, :, 3] == 0).all() and (expected[:, :, 3] == 0).all()
    assert error(expected, found) <= BOUND
    _, found, _ = latents("turboquant:bits=4", mask=mask, new=20)
    assert (found[:, :, 3] == 0).all() and (found[:, :, 4] != 0).any()


def test_masks_with_strides():
    wide = torch.rand(1, 6, 20, 640, generator=torch.Generator().manual_seed(0)) > 0.4
    same(spec="turboquant:bits=4", new=20, mask=wide[..., ::2])
    same(spec="turboquant:bits=4", new=20, mask=wide[..., 3:323])


@pytest.mark.parametrize("dtype", (torch.float16, torch.bfloat16))
def test_half_precision(dtype):
    """The output is rounded to the dtype: at most its last bit differs, seldom."""
    for make in (both, latents):
        expected, found, calls = make("turboquant:bits=4", dtype=dtype, new=19)
        assert calls == {"cpu": 1}
        assert error(expected, found) <= torch.finfo(dtype).eps / 4


def test_inputs_without_alignment_or_in_other_orders():
    def odd(x):
        batch, heads, tokens, dim = x.shape
        wide = torch.full((batch, tokens, heads, dim + 3), torch.nan, dtype=x.dtype)
        view = wide.transpose(1, 2)[..., 1 : dim + 1]
        view.copy_(x)
        return view

    same(spec="turboquant:bits=4", new=23, batch=2, change=odd)
    same(spec="none", new=23, change=lambda x: x.mT.contiguous().mT)


@pytest.mark.parametrize("spec", ("turboquant:bits=4", "kivi:bits=2", "fp8"))
def test_pages(spec):
    for make in (both, latents):
        expected, found, calls = make(spec, layout="paged", batch=3, held=290, new=20)
        assert set(calls) == {"cpu"}
        assert error(expected, found) <= BOUND


@pytest.mark.parametrize("spec", LATENT_FORMATS)
@pytest.mark.parametrize("shape", ((16, 512, 64), (1, 32, 8), (5, 40, 36), (128, 96, 32)))
def test_latents(spec, shape):
    q_heads, rank, rope = shape
    case = {"spec": spec, "q_heads": q_heads, "rank": rank, "rope": rope}
    same(latents, held=300, new=1, **case)
    same(latents, held=33, new=17, **case)


@pytest.mark.parametrize("held", (1, 31, 64, 129, 700))
@pytest.mark.parametrize("exact", (",window=0,sinks=0", ",window=40", ",window=3/kivi:bits=4"))
def test_latents_of_every_length(held, exact):
    same(latents, spec=f"turboquant:bits=4{exact}", rank=128, held=held, new=3, batch=2)


def test_heads_over_latents_are_counted_as_native():
    cache = MLACache("turboquant:bits=4", 1, 32, 8)
    generator = torch.Generator().manual_seed(0)
    for count in (50, 1, 20):
        made = [random_tokens(generator, 1, 1, count, d) for d in (32, 8)]
        made += [random_tokens(generator, 1, 4, count, d) for d in (16, 8)]
        cache.attend_heads(0, *made, *(random_tokens(generator, 4, d, 32) for d in (16, 12)))
    assert cache.stats()["compute"]["attend"] == {"cpu": 3}
    with pytest.raises(GeometryError, match="mask"):
        q = random_tokens(generator, 1, 4, 1, 40)
        mask = torch.ones(1, 1, 1, 7, dtype=torch.bool)
        config = AttendConfig(softmax_scale=1.0, mask=mask)
        cache.attend(0, made[0][:, :, :1], made[1][:, :, :1], q, config)


@settings(max_examples=500, deadline=None)
@given(
    spec=st.sampled_from(FORMATS),
    heads=st.integers(1, 3),
    groups=st.integers(1, 6),
    dim=st.sampled_from((16, 32, 48, 64, 100)),
    held=st.integers(1, 290),
    new=st.integers(1, 40),
    batch=st.integers(1, 2),
    seed=st.integers(0, 1000),
    sliding_window=st.none() | st.integers(1, 300),
    softcap=st.none() | st.floats(0.5, 50),
)
def test_random_cases(**case):
    same(bound=2 * BOUND, **case)


@settings(max_examples=200, deadline=None)
@given(
    spec=st.sampled_from([spec for spec in FORMATS if "/" not in spec]),
    q_heads=st.integers(1, 20),
    rank=st.sampled_from((32, 64, 100, 512)),
    rope=st.sampled_from((16, 36, 64)),
    held=st.integers(1, 290),
    new=st.integers(1, 20),
    batch=st.integers(1, 2),
    seed=st.integers(0, 1000),
    sliding_window=st.none() | st.integers(1, 300),
)
def test_random_latents(**case):
    same(latents, bound=2 * BOUND, **case)


@pytest.mark.parametrize("level", [x for x in LEVELS if x != "avx512vbmi"])  # avx512's code
def test_every_simd_level(level):
    told = at_level(level, "rows_compare.py")
    assert told["cases"] > 70
    assert told["worst"] <= BOUND


@pytest.mark.parametrize("make", (both, latents))
def test_threads_give_the_same_numbers(make):
    """One thread takes all tokens of a head, more of them split the tokens and merge."""
    case = {"held": 6000, "new": 2, "batch": 1 if make is latents else 3}
    threads = torch.get_num_threads()
    try:
        outputs = []
        for count in (1, 2, 5):
            torch.set_num_threads(count)
            expected, found, _ = make("turboquant:bits=4", **case)
            assert error(expected, found) <= BOUND
            outputs.append(found)
    finally:
        torch.set_num_threads(threads)
    assert all(error(outputs[0], other) <= BOUND for other in outputs[1:])


def test_rows_decide_on_the_kernel(monkeypatch):
    """Rows are query heads of a KV head times queries; latents always have many."""
    taken, real = [], library()

    class Library:
        def __getattr__(self, name):
            return getattr(real, name)

        def attend(self, bit, args, count):
            taken.append("few")
            return real.attend(bit, args, count)

        def attend_rows(self, bit, args, latent):
            taken.append("latent" if latent else "many")
            return real.attend_rows(bit, args, latent)

    monkeypatch.setattr("kvpact.kernels.cpu.backend.library", lambda: Library())
    monkeypatch.setattr(native, "MANY_ROWS", 12)
    both("turboquant:bits=4", groups=1, new=9)  # too many for a step
    both("turboquant:bits=4", groups=2, new=9)
    latents("turboquant:bits=4", q_heads=1, new=9)
    assert taken == ["few", "many", "latent"]


@pytest.mark.parametrize("status", (2, 3))
def test_a_refusal_of_the_kernel_is_named(monkeypatch, status):
    class Library:
        def __getattr__(self, name):
            return getattr(library(), name)

        def attend_rows(self, bit, args, latent):
            return status

    monkeypatch.setattr("kvpact.kernels.cpu.backend.library", lambda: Library())
    with pytest.raises(MemoryError if status == 3 else KVPactError):
        both("turboquant:bits=4", new=40)


def test_long_contexts_lose_nothing_to_rounding():
    """Sums of blocks are added up, not numbers: the error hardly grows with the tokens."""
    case = {"heads": 1, "groups": 2, "dim": 32, "new": 2}
    assert error(*both("turboquant:bits=4", held=20000, **case)[:2]) <= 1e-6


def test_a_long_prompt_by_chunks():
    """Chunks of 128 tokens through both caches: growth, rollback and all."""
    outputs = []
    for kernel in ("torch", "cpu"):
        generator = torch.Generator().manual_seed(5)
        cache = create_cache("turboquant:bits=4", CacheGeometry(1, 2, 64), backend=kernel)
        found = []
        for count in (128, 128, 100, 40):
            k, v = (random_tokens(generator, 1, 2, count, 64) for _ in "kv")
            q = random_tokens(generator, 1, 6, count, 64)
            found.append(cache.attend(0, k, v, q))
            if count == 100:
                cache.truncate(330)
        outputs.append(found)
    for expected, found in zip(*outputs, strict=True):
        assert error(expected, found) <= BOUND
