"""New tokens that torch's flash attention attends to each other, and those that it may not."""

import pytest
import torch

pytest.importorskip("triton")

from kvpact import AttendConfig, CacheGeometry, create_cache
from kvpact.kernels.base import AttendCall
from kvpact.kernels.torch.attend import attend
from kvpact.kernels.torch.backend import TORCH
from kvpact.kernels.triton import tuning
from kvpact.kernels.triton.attend import attend as attention
from kvpact.kernels.triton.attend import prompt
from kvpact.kernels.triton.attend.attend import attend_triton
from kvpact.kernels.triton.attend.prompt import attend_prompt, is_chunk, is_plain_prompt
from kvpact.testing.backend import unwritten_is_nan
from kvpact.testing.data import random_tokens

BOUNDS = {torch.float16: 5e-4, torch.bfloat16: 4e-3}


def call(dtype=torch.bfloat16, q_heads=6, dim=32, new=9, queries=9, padding=None, **rules):
    generator = torch.Generator().manual_seed(0)
    k, v = (torch.randn(2, 2, new, dim, generator=generator).to(dtype) for _ in range(2))
    q = torch.randn(2, q_heads, queries, dim, generator=generator).to(dtype)
    return AttendCall(None, k, v, q, AttendConfig(**rules), padding)


@pytest.mark.parametrize("rules", [{}, {"softmax_scale": 0.3}, {"is_causal": False}])
@pytest.mark.parametrize("q_heads", [2, 6])
def test_it_is_the_torch_body(q_heads, rules):
    given = call(q_heads=q_heads, **rules)
    assert is_plain_prompt(given)
    expected, found = attend(given).float(), attend_prompt(given).float()
    assert (found - expected).norm() <= 1e-2 * expected.norm()


@pytest.mark.parametrize("options", [
    {"dtype": torch.float32}, {"dim": 20}, {"dim": 320}, {"queries": 4},
    {"padding": torch.tensor([0, 3])}, {"softcap": 2.0}, {"sliding_window": 3},
    {"sink_logits": torch.zeros(6)}, {"mask": torch.ones(1, 1, 9, 9, dtype=torch.bool)},
], ids=str)  # fmt: skip
def test_others_are_left_to_the_general_kernel(options):
    assert not is_plain_prompt(call(**options))


def chunk(spec, dtype, held, new=11, dim=24, groups=3, padding=None, seed=0, **rules):
    """Return a call of two rows over a cache that the torch bodies filled."""

    def tokens(heads, count, side):
        return random_tokens(2, heads, count, dim, seed=10 * seed + side, dtype=dtype)

    cache = create_cache(spec, CacheGeometry(1, 2, dim, dtype=dtype), backend="torch")
    cache.prefill(0, tokens(2, held, 0), tokens(2, held, 1), config=AttendConfig(padding=padding))
    k, v = tokens(2, new, 2), tokens(2, new, 3)
    step = cache.store(0, k=k, v=v, config=AttendConfig())
    config = AttendConfig(**rules)
    return AttendCall(step.view, k, v, tokens(2 * groups, new, 4), config, step.padding)


@pytest.fixture
def few(monkeypatch):
    """Chunks of few tokens, in several parts; the list that their flash attention is put into."""
    monkeypatch.setattr(prompt, "LEAST_CHUNK", 5)
    monkeypatch.setattr(tuning, "TOKENS_OF_A_PART", 32)
    made = []

    def recorded(calls, scale):
        made.append(prompt.attend_new(calls, scale))
        return made[-1]

    monkeypatch.setattr(attention, "attend_new", recorded)
    return made


@pytest.mark.parametrize(("spec", "dtype", "held", "rules"), [
    ("turboquant:bits=4,sinks=3,window=9", torch.bfloat16, 70, {}),
    ("turboquant:bits=4,sinks=3,window=9", torch.float16, 33, {"softmax_scale": 0.3}),
    ("int:bits=8,window=0,sinks=0", torch.float16, 64, {"is_causal": False}),
    ("kivi:bits=2,window=5", torch.float16, 47, {"sink_logits": torch.linspace(-1, 3, 6)}),
    ("none", torch.bfloat16, 40, {"padding": torch.tensor([0, 7])}),
    ("fp8:sinks=3,window=2", torch.float16, 39, {"padding": torch.tensor([39, 2])}),
    ("turboquant:bits=4/int:bits=8,window=9", torch.float16, 70, {"sliding_window": 11}),
], ids=str)  # fmt: skip
def test_a_chunk_is_flash_attention_beside_its_past(spec, dtype, held, rules, few):
    given = chunk(spec, dtype, held, **rules)
    assert is_chunk(given)
    with unwritten_is_nan():
        found = attend_triton([given]).float()
    expected = TORCH.attend([given]).float()
    assert len(few) == 1 and found.shape == expected.shape
    assert (found - expected).norm() <= BOUNDS[dtype] * expected.norm()


def test_chunks_of_unlike_pasts_are_one_launch(few):
    calls = [
        chunk("int:bits=8", torch.float16, held, new=6, seed=seed, sink_logits=logits, **rules)
        for seed, (held, logits, rules) in enumerate(
            [(40, None, {}), (3, torch.ones(6), {}), (70, None, {"is_causal": False})]
        )
    ]
    # That one's window is shorter than the chunk.
    calls.append(calls[0]._replace(config=AttendConfig(sliding_window=4)))
    with unwritten_is_nan():
        found = attend_triton(calls).float()
    expected = TORCH.attend(calls).float()
    assert len(few) == 1 and few[0].output.shape[0] == 6
    for some, other in zip(found.split(2), expected.split(2), strict=True):
        assert (some - other).norm() <= 5e-4 * other.norm()


def test_other_chunks_are_left_to_the_general_kernel(few):
    whole = chunk("int:bits=8", torch.float16, 40)
    assert is_chunk(whole)
    for config in (
        AttendConfig(softcap=2.0),
        AttendConfig(sliding_window=10),
        AttendConfig(mask=torch.ones(1, 1, 11, 51, dtype=torch.bool)),
    ):
        assert not is_chunk(whole._replace(config=config))
    assert not is_chunk(whole._replace(view=None))
    assert not is_chunk(whole._replace(k=None, v=None))
    assert not is_chunk(whole._replace(q=whole.q[:, :, 1:]))
    assert not is_chunk(whole._replace(padding=torch.tensor([0, 41])))
    assert not is_chunk(whole._replace(**{x: getattr(whole, x)[:, :, :4] for x in "kvq"}))
    assert not is_chunk(whole._replace(**{x: getattr(whole, x).float() for x in "kvq"}))
