"""Attention by the native kernel is the torch body's, at every shape, format and SIMD level."""

from __future__ import annotations

import math
import sys

import pytest
import torch
from compare import BOUND, FORMATS, both, check_guards, error, guarded_output
from hypothesis import given, settings
from hypothesis import strategies as st
from simd_levels import at_level

from kvpact import AttendConfig, CacheGeometry, create_cache
from kvpact.errors import BackendUnavailable, GeometryError
from kvpact.kernels import choose
from kvpact.kernels.cpu import LEVELS, library
from kvpact.kernels.cpu import attend as native
from kvpact.kernels.cpu.library import _load
from kvpact.transforms import IDENTITY, RandomHadamard

pytestmark = pytest.mark.skipif(isinstance(_load(), str), reason=f"native kernels: {_load()}")


@pytest.fixture(autouse=True)
def guards(monkeypatch):
    monkeypatch.setattr(native, "new_output", guarded_output)


def same(bound=BOUND, **case):
    expected, found, calls = both(**case)
    assert calls == {"cpu": 1}
    check_guards()
    assert error(expected, found) <= bound


@pytest.mark.parametrize("spec", FORMATS)
def test_every_format(spec):
    same(spec=spec, groups=4, dim=64, held=333)
    same(spec=spec, groups=1, dim=80, held=128, seed=1)


@pytest.mark.parametrize("dim", (32, 36, 64, 80, 96, 128, 256, 576))
@pytest.mark.parametrize("spec", ("turboquant:bits=4", "kivi:bits=3,group=64", "int:bits=8"))
def test_every_width(spec, dim):
    same(spec=spec, dim=dim, held=200)


def test_values_of_another_width():
    same(spec="turboquant:bits=4", dim=96, value_dim=64)
    same(spec="turboquant:bits=3", dim=40, value_dim=128)


@pytest.mark.parametrize("held", (1, 31, 32, 33, 63, 64, 65, 127, 128, 129, 255, 513))
@pytest.mark.parametrize("exact", ("", ",window=0,sinks=0", ",window=1,sinks=3"))
def test_every_length(held, exact):
    same(spec=f"turboquant:bits=4{exact}", held=held)


@pytest.mark.parametrize("groups", (1, 2, 3, 4, 5, 6, 7, 8, 12, 16))
@pytest.mark.parametrize("spec", ("turboquant:bits=4", "turboquant:bits=5", "fp8"))
def test_every_number_of_query_heads(spec, groups):
    same(spec=spec, groups=groups)


@pytest.mark.parametrize("new", (2, 5, 16))
def test_several_queries(new):
    same(spec="turboquant:bits=4", new=new, batch=2)


@pytest.mark.parametrize(
    "config",
    (
        {"sliding_window": 1},
        {"sliding_window": 40},
        {"sliding_window": 250},
        {"softcap": 1.5},
        {"softmax_scale": 0.5},
        {"is_causal": False},
        {"exact_new": False},
        {"sink_logits": torch.linspace(-2, 4, 6)},
        {"mask": torch.arange(303) % 3 > 0},
        {"mask": torch.linspace(-3, 3, 303)},
        {"mask": torch.where(torch.arange(303) % 2 == 0, 0.0, torch.finfo(torch.float32).min)},
        {"mask": torch.where(torch.arange(303) % 2 == 0, 0.0, -torch.inf).bfloat16()},
    ),
    ids=str,
)
def test_every_rule(config):
    if "mask" in config:
        config = {**config, "mask": config["mask"].expand(1, 1, 3, 303)}
    same(spec="turboquant:bits=4", new=3, **config)


def test_padding():
    same(spec="turboquant:bits=4", batch=3, padding=torch.tensor([0, 5, 140]))


def test_a_query_that_sees_nothing_gets_zeros():
    mask = torch.zeros(1, 1, 1, 301, dtype=torch.bool)
    expected, found, _ = both("turboquant:bits=4", mask=mask)
    assert (expected == 0).all() and (found == 0).all()


def test_masks_with_strides():
    wide = torch.rand(1, 6, 2, 604, generator=torch.Generator().manual_seed(0)) > 0.4
    same(spec="turboquant:bits=4", new=2, mask=wide[..., ::2])
    same(spec="turboquant:bits=4", new=2, mask=wide[..., 3:305])


@pytest.mark.parametrize("many", (False, True))
def test_weights_below_the_normal_numbers_are_nothing(many, monkeypatch):
    """Processors take a hundred times as long over them; a large value would show them."""
    if many:
        monkeypatch.setattr(native, "MANY_ROWS", 1)
    cache = create_cache("none", CacheGeometry(1, 1, 32, dtype=torch.float32), backend="cpu")
    k, v, q = torch.zeros(1, 1, 40, 32), torch.ones(1, 1, 40, 32), torch.zeros(1, 1, 40, 32)
    k[..., 0], q[..., 0] = -130 * math.log(2), 1.0  # 2**-130 beside the first token's 1
    k[:, :, 0], v[:, :, 1:] = 0.0, 1e38
    cache.prefill(0, k[:, :, :-1], v[:, :, :-1])
    config = AttendConfig(softmax_scale=1.0)
    output = cache.attend(0, k[:, :, -1:], v[:, :, -1:], q[:, :, -1:], config=config)
    assert torch.equal(output, torch.ones(1, 1, 1, 32))


@pytest.mark.parametrize("dtype", (torch.float16, torch.bfloat16))
def test_half_precision(dtype):
    """The output is rounded to the dtype: at most its last bit differs, seldom."""
    expected, found, calls = both("turboquant:bits=4", dtype=dtype)
    assert calls == {"cpu": 1}
    assert error(expected, found) <= torch.finfo(dtype).eps / 4


def test_inputs_without_alignment_or_in_other_orders():
    def odd(x):
        batch, heads, tokens, dim = x.shape
        wide = torch.full((batch, tokens, heads, dim + 3), torch.nan, dtype=x.dtype)
        view = wide.transpose(1, 2)[..., 1 : dim + 1]
        view.copy_(x)
        return view

    same(spec="turboquant:bits=4", new=3, batch=2, change=odd)
    same(spec="none", change=lambda x: x.mT.contiguous().mT)


@pytest.mark.parametrize("spec", ("turboquant:bits=4", "kivi:bits=2", "fp8"))
def test_pages(spec):
    expected, found, calls = both(spec, layout="paged", batch=3, held=290)
    assert calls == {"cpu": 3}
    assert error(expected, found) <= BOUND


def test_after_growth_rollback_fork_and_selection():
    """Pointers to segments follow every change of the segments."""
    outputs = []
    for kernel in ("torch", "cpu"):
        generator = torch.Generator().manual_seed(3)
        cache = create_cache("turboquant:bits=4", CacheGeometry(1, 2, 64), backend=kernel)
        found = []

        def step(new, cache, generator=generator, found=found):
            rows = cache.batch_size or 2
            k, v = torch.randn(2, rows, 2, new, 64, generator=generator)
            q = torch.randn(rows, 4, new, 64, generator=generator)
            found.append(cache.attend(0, k, v, q))

        for new in (100, 1, 60, 1, 130, 1):
            step(new, cache)
        fork = cache.fork()
        cache.truncate(150)
        for target in (cache, fork, cache):
            step(1, target)
        cache.reorder(torch.tensor([1, 0]))
        step(1, cache)
        cache.select(torch.tensor([1]))
        step(2, cache)
        outputs.append(found)
    for expected, found in zip(*outputs, strict=True):
        assert error(expected, found) <= BOUND


@settings(max_examples=1000, deadline=None)
@given(
    spec=st.sampled_from(FORMATS),
    heads=st.integers(1, 3),
    groups=st.integers(1, 6),
    dim=st.sampled_from((16, 32, 48, 64, 100)),
    held=st.integers(1, 290),
    new=st.integers(1, 4),
    batch=st.integers(1, 2),
    seed=st.integers(0, 1000),
    sliding_window=st.none() | st.integers(1, 300),
    softcap=st.none() | st.floats(0.5, 50),
)
def test_random_cases(**case):
    same(bound=2 * BOUND, **case)


@pytest.mark.parametrize("level", LEVELS)
def test_every_simd_level(level):
    told = at_level(level, "compare.py")
    assert told["cases"] > 40
    assert told["worst"] <= BOUND


@pytest.mark.parametrize(
    ("spec", "groups"),
    (("turboquant:bits=4", 2), ("turboquant:bits=8", 3), ("turboquant:bits=4", 7)),
)
def test_threads_give_the_same_numbers(spec, groups):
    """Also where a pass computes rows more than there are: they were another thread's once."""
    case = {"spec": spec, "heads": 3, "held": 6000, "groups": groups}
    threads = torch.get_num_threads()
    try:
        outputs = []
        for count in (1, 2, 5):
            torch.set_num_threads(count)
            expected, found, _ = both(**case)
            assert error(expected, found) <= BOUND
            outputs.append(found)
    finally:
        torch.set_num_threads(threads)
    assert all(error(outputs[0], other) <= BOUND for other in outputs[1:])


def test_the_kernel_is_told_and_chosen():
    geometry = CacheGeometry(1, 2, 64)
    cpu = create_cache("turboquant:bits=4", geometry, backend="cpu").stats()["compute"]
    assert cpu["name"] == "cpu" and cpu["requested"] == "cpu"
    assert create_cache("fp8", geometry, backend="torch").stats()["compute"]["name"] == "torch"
    with pytest.raises(BackendUnavailable, match="auto, cpu, triton, torch"):
        create_cache("fp8", geometry, backend="gpu")
    with pytest.raises(BackendUnavailable, match="full, int8"):
        create_cache("fp8", geometry, precision="int4")
    _, _, calls = both("turboquant:bits=4,mode=prod", backend="auto")
    assert calls == {"torch": 1}
    _, _, calls = both("turboquant:bits=4", new=40)
    assert calls == {"cpu": 1}


def test_without_the_library(monkeypatch):
    """No compiler at installation: auto computes in torch, a name raises with the reason."""
    module = sys.modules["kvpact.kernels.cpu.library"]
    monkeypatch.setattr(module, "_load", lambda: "not built: no compiler")
    cache = create_cache("turboquant:bits=4", CacheGeometry(1, 2, 64))
    cache.store(0, *torch.zeros(2, 1, 2, 3, 64))
    stats = cache.stats()["compute"]
    assert stats["name"] == "torch"
    assert all("no compiler" in stats["reasons"][f"{op}: torch"] for op in ("attend", "encode"))
    with pytest.raises(BackendUnavailable, match="no compiler"):
        choose("cpu")


@pytest.mark.parametrize("layout", ("contiguous", "paged"))
@pytest.mark.parametrize("spec", ("vq:dims=2", "qjl/int:bits=4", "turboquant:bits=4,mode=prod"))
def test_a_backend_asked_for_by_name_runs_or_raises(spec, layout):
    """`kernel="exact"` ran torch silently where it covered nothing."""
    options = {"num_pages": 2} if layout == "paged" else {}
    with pytest.raises(BackendUnavailable, match="'cpu' can't attend: cpu: no native format"):
        create_cache(spec, CacheGeometry(1, 2, 64), layout, backend="cpu", **options)


def test_a_misspelt_simd_level_is_an_error_and_not_a_slow_cache(monkeypatch):
    monkeypatch.setenv("KVPACT_SIMD", "avx3")
    with pytest.raises(BackendUnavailable, match="KVPACT_SIMD='avx3'"):
        create_cache("turboquant:bits=4", CacheGeometry(1, 2, 64))


def test_what_does_not_fit_raises_before_the_kernel_runs():
    cache = create_cache("turboquant:bits=4", CacheGeometry(1, 2, 64), backend="cpu")
    k, v = torch.randn(2, 1, 2, 50, 64, generator=torch.Generator().manual_seed(0))
    cache.prefill(0, k, v)
    q = k[:, :, :1].repeat(1, 2, 1, 1)
    for config in (
        AttendConfig(mask=torch.ones(1, 1, 1, 7, dtype=torch.bool)),
        AttendConfig(sink_logits=torch.zeros(3)),
        AttendConfig(n_kv_groups=3),
    ):
        with pytest.raises(GeometryError):
            cache.attend(0, k[:, :, :1], v[:, :, :1], q, config)
    assert cache.seq_len() == 50


def test_a_simd_level_that_is_not_known(monkeypatch):
    from kvpact.kernels.cpu.library import cap

    monkeypatch.setenv("KVPACT_SIMD", "sse9")
    with pytest.raises(BackendUnavailable, match="none, neon, avx2, avx512, avx512vbmi"):
        cap()


@pytest.mark.parametrize("level", LEVELS)
def test_a_cap_takes_the_best_that_the_processor_has_below_it(monkeypatch, level):
    monkeypatch.setenv("KVPACT_SIMD", level)
    below = [*LEVELS][: [*LEVELS].index(level) + 1]
    assert _load.__wrapped__().level == [x for x in library().levels if x in below][-1]


@pytest.mark.skipif(
    isinstance(_load(), str) or "avx512" not in library().levels, reason="fast needs AVX-512 VNNI"
)
@pytest.mark.parametrize(
    "spec",
    (
        "turboquant:bits=4",
        "turboquant:bits=2",
        "int:bits=8",
        "int:bits=4,group=64",
        "int:bits=4,group=256,rotate=true",
    ),
)
@pytest.mark.parametrize("shape", ((1, 64), (3, 80), (4, 128), (8, 36), (6, 256)))
def test_fast_adds_one_percent(spec, shape):
    """8-bit arithmetic is another result, by a bounded amount: q is rounded to 8 bits."""
    groups, dim = shape
    case = {"spec": f"{spec},window=0,sinks=0", "groups": groups, "dim": dim, "held": 700}
    expected, found, calls = both(**case, backend="cpu", precision="int8")
    assert calls == {"cpu": 1}
    check_guards()
    assert 1e-4 < error(expected, found) < 0.02


@pytest.mark.skipif(
    isinstance(_load(), str) or "avx512" not in library().levels, reason="fast needs AVX-512 VNNI"
)
@pytest.mark.parametrize("spec", ("turboquant:bits=4", "turboquant:bits=2", "int:bits=8"))
@pytest.mark.parametrize("dim", (64, 80))
def test_fast_takes_levels_as_they_are(spec, dim):
    """Queries of 8 bits lose nothing, and two digits of the weights little: levels are exact.

    Levels rounded to 127ths of the largest one would be 1e-3 off at 2 bits and 8e-3 at 4.
    """
    rotation = RandomHadamard(dim) if spec.startswith("turboquant") else IDENTITY

    def whole(x: torch.Tensor) -> torch.Tensor:
        if x.shape[1] == 2:
            return x  # a token
        steps = (x * 30).round().clamp(-126, 126)
        steps[..., 0] = 127
        return rotation.inverse(steps) / 64

    for seed in range(3):
        case = {"dim": dim, "held": 700, "seed": seed, "change": whole, "backend": "cpu"}
        expected, found, _ = both(f"{spec},window=0,sinks=0", **case, precision="int8")
        assert 1e-6 < error(expected, found) < 3e-4


def test_fast_is_exact_where_there_are_no_bytes():
    expected, found, _ = both("kivi:bits=4", backend="cpu", precision="int8")
    assert error(expected, found) <= BOUND


def test_a_library_of_older_sources_is_told_not_loaded(monkeypatch):
    module = sys.modules["kvpact.kernels.cpu.library"]

    def missing(path, level):
        raise AttributeError("undefined symbol")

    monkeypatch.setattr(module, "NativeLibrary", missing)
    assert "another version" in module._load.__wrapped__()
