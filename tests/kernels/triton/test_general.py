"""Attention by the Triton kernels, interpreted, against the torch bodies."""

from typing import Any

import pytest
import torch
from forms import slow
from torch import Tensor

pytest.importorskip("triton")

from kvpact import AttendConfig, CacheGeometry, create_cache
from kvpact.errors import BackendUnavailable, CorruptState
from kvpact.kernels.base import AttendCall
from kvpact.kernels.torch.backend import TORCH
from kvpact.kernels.triton import tuning
from kvpact.kernels.triton.attend import attend
from kvpact.kernels.triton.attend.attend import attend_triton
from kvpact.kernels.triton.tuning import GeneralChoice
from kvpact.testing.backend import CALLS, BackendContract, unwritten_is_nan
from kvpact.testing.data import random_tokens

MAKER = BackendContract()
CODES = "turboquant:bits=4,sinks=3,window=9"
SPECS = (
    "none", "fp8:sinks=3,window=9", "int:bits=8,sinks=2,window=0/turboquant:bits=3,window=27",
    "kivi:bits=2,sinks=0,window=5", "kvarn:bits=3,group=32,sinks=0,window=0",
    "turboquant:bits=3,center=64,sinks=3,window=0/kivi:bits=2,sinks=1,window=1",
)  # fmt: skip
BOUNDS = {torch.float32: 1e-6, torch.float16: 5e-4, torch.bfloat16: 4e-3}


def made(
    spec: str, name: str, dim: int, dtype: torch.dtype, held: int, seed: int = 0
) -> AttendCall:
    """Return one of the contract's calls, over so many tokens."""
    return MAKER._call(spec, name, dim, dtype, seed, held - CALLS[name][0])


def error(calls: list[AttendCall]) -> float:
    """Return the norm of what differs from torch's output, over that output's norm."""
    expected = TORCH.attend(calls)
    with unwritten_is_nan():
        found = attend_triton(calls)
    assert found.shape == expected.shape and found.dtype == expected.dtype
    size = expected.double().norm().item()
    return (found.double() - expected.double()).norm().item() / (size or 1.0)


@pytest.fixture(autouse=True)
def small_parts(monkeypatch):
    monkeypatch.setattr(tuning, "TOKENS_OF_A_PART", 64)
    # Pieces of channels, where more than 32 are there.
    monkeypatch.setattr(attend, "general_choice", lambda *_: GeneralChoice(4, 32, 32))
    # Another kernel's tokens would be its own.
    monkeypatch.setattr(attend, "fast_of", lambda *_: None)


def counted(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Return a list that the grid of every launch of the kernel is put into."""
    launches: list[Any] = []
    kernel = attend.attend_general

    class Counted:
        def __getitem__(self, grid: Any) -> Any:
            launches.append(grid)
            return kernel[grid]

    monkeypatch.setattr(attend, "attend_general", Counted())
    return launches


@pytest.mark.parametrize("spec", SPECS)
def test_formats(spec):
    assert error([made(spec, "one token", 20, torch.float32, 70)]) < BOUNDS[torch.float32]


@pytest.mark.parametrize(("name", "dim", "dtype"), [
    ("a short past", 64, torch.bfloat16), ("a chunk", 16, torch.float16),
    ("softcap", 33, torch.float32), ("a sliding window", 20, torch.float32),
    ("sinks", 36, torch.float32), ("padding", 20, torch.bfloat16),
    ("not causal", 20, torch.float32), ("nothing seen", 20, torch.float32),
    ("an additive mask", 20, torch.float16),
])  # fmt: skip
def test_rules(name, dim, dtype):
    held = CALLS[name][0] if "mask" in CALLS[name][3] else min(CALLS[name][0], 40)
    call = made(CODES, name, dim, dtype, held)
    assert error([call]) < BOUNDS[dtype]


@pytest.mark.slow
def test_many_parts(monkeypatch):
    """More than are merged at once."""
    monkeypatch.setattr(tuning, "TOKENS_OF_A_PART", 32)
    call = made(CODES, "one token", 16, torch.float32, 520)
    assert error([call._replace(q=call.q[:, :3])]) < BOUNDS[torch.float32]


def test_many_rows(monkeypatch):
    """More than a program has, in an order of their own; on the one axis that is not short."""
    monkeypatch.setattr(attend, "MOST_ROWS", 16)
    launches = counted(monkeypatch)
    call = made(CODES, "a chunk", 16, torch.float32, 30)
    call = call._replace(q=call.q[:, :, -17:], config=AttendConfig(sliding_window=20))
    assert error([call]) < BOUNDS[torch.float32]
    batch, q_heads, queries, _ = call.q.shape
    heads = call.kv_heads
    row_tiles = -(-q_heads // heads * queries // 16)
    assert launches == [(row_tiles * heads, 2, batch)]


def test_tanh_of_small_and_large_numbers(monkeypatch):
    """Neither is lost to rounding."""
    call = made("none", "one token", 16, torch.float32, 40)
    for softcap in (0.05, 1e7):
        config = AttendConfig(softcap=softcap, softmax_scale=0.7)
        assert error([call._replace(config=config)]) < BOUNDS[torch.float32]


def masks(total: int) -> dict[str, Tensor]:
    """Return masks of every shape and dtype for 2 rows, 6 heads and 5 queries."""
    generator = torch.Generator().manual_seed(3)
    seen = torch.rand(2, 6, 5, total, generator=generator) < 0.7
    seen[1, 2, 3] = False
    lowest = torch.finfo(torch.float16).min
    return {
        "boolean": seen, "one head": seen[:, :1], "one row": seen[:1].expand(2, -1, -1, -1),
        "additive": torch.randn(1, 6, 5, total, generator=generator, dtype=torch.float64),
        "lowest": torch.where(seen, 0.5, lowest).half(),
    }  # fmt: skip


@pytest.mark.parametrize("name", ["one head", "lowest", *slow("boolean", "one row", "additive")])
def test_masks(name):
    call = made("int:bits=4,sinks=1,window=9", "softcap", 16, torch.float32, 40)
    config = AttendConfig(mask=masks(45)[name], is_causal=False)
    call = call._replace(q=call.q[:, :6], config=config)
    assert error([call]) < BOUNDS[torch.float32]


def test_unlike_lengths_are_one_launch(monkeypatch):
    """Sequences of unlike lengths, windows and masks; one without packed tokens yet."""
    launches = counted(monkeypatch)
    given = (CODES, "one token", 20, torch.float32)
    calls = [made(*given, held, seed) for seed, held in enumerate((70, 2, 40))]
    calls[0] = calls[0]._replace(config=AttendConfig(sliding_window=9))
    calls[2] = calls[2]._replace(config=AttendConfig(is_causal=False))
    assert error(calls) < BOUNDS[torch.float32]
    assert len(launches) == 1
    calls[1] = calls[1]._replace(config=AttendConfig(softcap=1.0))
    assert error(calls) < BOUNDS[torch.float32]
    assert len(launches) == 3


def test_new_tokens_alone():
    """Without a view, and strided; then a batch in which only one call has a past."""
    k, v, q = (
        random_tokens(2, count, heads, width, seed=seed).transpose(1, 2)
        for seed, (heads, count, width) in enumerate(((3, 37, 24), (3, 37, 40), (6, 37, 24)))
    )
    call = AttendCall(None, k, v, q, AttendConfig())
    assert error([call]) < BOUNDS[torch.float32]
    one = made("none", "one token", 24, torch.float32, 40)
    assert error([call._replace(q=q[:, :3, -1:]), one._replace(q=one.q[:, :3])]) < 1e-6


def test_tokens_that_the_view_holds_already():
    call = made(CODES, "one token", 20, torch.float32, 70)
    assert error([call._replace(k=None, v=None)]) < BOUNDS[torch.float32]


def latents(spec: str, held: int, new: int, dtype: torch.dtype, rank: int = 40) -> AttendCall:
    """Return a call over latents."""
    cache = create_cache(spec, CacheGeometry.mla(1, rank, 8, dtype), backend="torch")
    shapes = ((1, held, rank), (1, held, 8), (1, new, rank), (1, new, 8), (5, new, rank + 8))
    *past, k, v, q = (
        random_tokens(2, *shape, seed=i, dtype=dtype) for i, shape in enumerate(shapes)
    )
    cache.prefill(0, *past)
    step = cache.store(0, k=k, v=v, config=AttendConfig())
    config = AttendConfig(softmax_scale=0.1)
    return AttendCall(step.view, k, v, q, config, step.padding, latent=True)


@pytest.mark.parametrize(("spec", "held", "new", "dtype"), [
    (CODES, 75, 4, torch.float32),
    ("kivi:bits=4,sinks=0,window=3/none", 100, 1, torch.float32),
    ("none/fp8:sinks=0,window=0", 66, 1, torch.bfloat16),
])  # fmt: skip
def test_latents(spec, held, new, dtype):
    call = latents(spec, held, new, dtype)
    assert error([call]) < BOUNDS[dtype]
    assert error([call._replace(view=None)]) < BOUNDS[dtype]


TREATED = "trellis:bits=3,sinks=2,window=3"


@pytest.mark.parametrize(("spec", "dim", "held"), [
    ("trellis:bits=2,weights=false,blocks=false,first=false,sinks=0,window=0", 40, 66),
    *slow((TREATED, 20, 200), (TREATED, 72, 200)),
])  # fmt: skip
def test_treated_keys(spec, dim, held):
    call = made(spec, "one token", dim, torch.float32, held)
    assert call.view.k.exact_from >= 64
    assert error([call]) < BOUNDS[torch.float32]


@pytest.mark.slow
def test_treated_keys_of_caches_that_learnt_apart():
    """Each call's queries are treated as its own codec has learnt; one has learnt nothing yet."""
    given = (TREATED, "one token", 20, torch.bfloat16)
    calls = [made(*given, held, seed) for seed, held in enumerate((150, 20, 170))]
    assert error(calls) < BOUNDS[torch.bfloat16]


def test_what_does_not_fit_is_refused():
    call = made(SPECS[1], "one token", 16, torch.float32, 40)
    shorter = call.view.v._replace(tail=call.view.v.tail[:, :, :-1])
    with pytest.raises(CorruptState, match="40 tokens and V 39"):
        attend_triton([call._replace(view=call.view._replace(v=shorter))])
    with pytest.raises(BackendUnavailable, match="SignCodec"):
        attend_triton([made("qjl", "one token", 16, torch.float32, 40)])
    with pytest.raises(BackendUnavailable, match="treated"):
        attend_triton([latents(TREATED, 40, 1, torch.float32)])
