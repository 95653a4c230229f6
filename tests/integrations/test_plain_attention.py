"""Attention of prompts over plain K and V: what ``sdpa`` computes, by the native kernel."""

import pytest
import torch
from tiny_configs import SIZES, gemma3
from transformers import DynamicCache
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from kvpact.integrations.transformers import CompressedCache
from kvpact.integrations.transformers.attention import forward, plain
from kvpact.integrations.transformers.versions import named
from kvpact.kernels import BACKENDS

MANY = plain.LEAST_QUERIES
NATIVE = pytest.mark.skipif(
    bool(BACKENDS[0].runs_here(torch.device("cpu"))), reason="the native kernels were not built"
)


class Attention(torch.nn.Module):
    is_causal, num_key_value_groups, layer_idx = True, 3, 0


def numbers(*shape, seed=0, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def windowed(new, total, window):
    at, columns = torch.arange(total - new, total)[:, None], torch.arange(total)
    return ((columns <= at) & (columns > at - window))[None, None]


@NATIVE
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "new,total,window", [(96, 96, 7), (300, 300, 65), (97, 160, 66), (257, 301, 45)]
)
def test_a_window_is_that_of_the_mask(new, total, window, dtype, monkeypatch):
    q = numbers(2, 6, new, 40, dtype=dtype)
    k = numbers(2, 2, total, 40, seed=1, dtype=dtype)
    v = numbers(2, 2, total, 24, seed=2, dtype=dtype)
    mask = windowed(new, total, window)
    wanted = sdpa_attention_forward(Attention(), q, k, v, mask, 0.0, 0.3)[0]
    monkeypatch.setattr(forward, "sdpa_attention_forward", None)
    monkeypatch.setattr(plain, "_last", None)
    for shown in (mask, mask.expand(2, -1, -1, -1), mask.expand(2, 6, -1, -1).clone()):
        plain.note_prompt(k)
        got = forward.attention_forward(
            Attention(), q, k, v, shown, 0.0, 0.3, sliding_window=window
        )[0]
        assert got.shape == wanted.shape and got.dtype is dtype and got.is_contiguous()
        assert (got - wanted).abs().max() <= (2e-6 if dtype is torch.float32 else 0.02)


@NATIVE
def test_a_prompt_without_a_mask_is_causal(monkeypatch):
    q, k, v = numbers(1, 6, 100, 16), numbers(1, 2, 100, 16, seed=1), numbers(1, 2, 100, 16, seed=2)
    wanted = sdpa_attention_forward(Attention(), q, k, v, None)[0]
    monkeypatch.setattr(forward, "sdpa_attention_forward", None)
    plain.note_prompt(k)
    got = forward.attention_forward(Attention(), q, k, v, None, sliding_window=30)[0]
    assert (got - wanted).abs().max() <= 2e-6


CASES = {
    "another cache": {"noted": False},
    "few": {"new": MANY - 1},
    "another mask": {"flip": (70, 3)},
    "one hidden more": {"flip": (80, 75)},
    "gradients": {"grad": True},
    "dropout": {"dropout": 0.5},
    "encoder": {"is_causal": False, "mask": None},
    "fewer queries, no mask": {"total": 140, "mask": None},
    "bias": {"position_bias": torch.zeros(1, 6, 100, 100)},
    "numbers": {"float_mask": True},
    "double": {"dtype": torch.float64},
}  # fmt: skip


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_everything_else_is_left_to_sdpa(case, monkeypatch):
    case = dict(case)
    noted = case.pop("noted", True)
    new = case.pop("new", 100)
    total, dtype = case.pop("total", new), case.pop("dtype", torch.float32)
    q = numbers(1, 6, new, 16, dtype=dtype)
    k, v = (numbers(1, 2, total, 16, seed=seed, dtype=dtype) for seed in (1, 2))
    q.requires_grad_(case.pop("grad", False))
    mask = case.pop("mask", windowed(new, total, 20))
    if (flip := case.pop("flip", None)) is not None:
        mask[0, 0, *flip] ^= True
    if case.pop("float_mask", False):
        mask = torch.zeros(mask.shape).masked_fill(~mask, -torch.inf)
    asked = []

    def sdpa(*given, **options):
        asked.append(given[4])
        return torch.zeros(1, new, 6, 16), None

    monkeypatch.setattr(forward, "sdpa_attention_forward", sdpa)
    plain.note_prompt(k if noted else v)
    forward.attention_forward(Attention().eval(), q, k, v, mask, sliding_window=20, **case)
    assert len(asked) == 1 and asked[0] is mask


def test_a_mask_is_compared_once_for_all_layers_and_again_when_it_changes(monkeypatch):
    monkeypatch.setattr(plain, "_last", None)
    mask = windowed(300, 330, 33)
    compared, equal = [], torch.equal
    monkeypatch.setattr(torch, "equal", lambda *x: compared.append(1) or equal(*x))
    assert plain.hides_as_window(mask, 33) and len(compared) == 2
    assert plain.hides_as_window(mask, 33) and len(compared) == 2
    assert not plain.hides_as_window(mask, 32)
    mask[0, 0, 299, 0] = True
    assert not plain.hides_as_window(mask, 33)
    assert plain.hides_as_window(windowed(300, 330, 330), None)
    assert not plain.hides_as_window(windowed(300, 330, 33)[..., :329], 33)


@pytest.mark.parametrize("own", [{"softcap": 2.0}, {"s_aux": torch.linspace(-1, 1, 6)}])
def test_what_sdpa_cant_do_has_the_window_too(own):
    """As attention that is told of the mask alone."""
    q, k, v = numbers(1, 6, 150, 16), numbers(1, 2, 170, 16, seed=1), numbers(1, 2, 170, 16, seed=2)
    mask = windowed(150, 170, 40)
    got = forward.attention_forward(Attention(), q, k, v, mask, sliding_window=40, **own)[0]
    wanted = forward.attention_forward(Attention(), q, k, v, mask, **own)[0]
    unlike = forward.attention_forward(Attention(), q, k, v, mask, sliding_window=40)[0]
    assert (got - wanted).abs().max() <= 3e-6 < 1e-3 < (got - unlike).abs().max()


@pytest.mark.parametrize("padded", [0, 9])
def test_prompts_in_pieces_are_those_of_transformers(padded, make_model):
    model = make_model(gemma3(dict(SIZES), "sliding", "full", "sliding", sliding_window=48))
    ids = torch.randint(3, 128, (2, 330), generator=torch.Generator().manual_seed(5))
    shown = torch.ones_like(ids)
    shown[0, :padded] = 0
    logits = []
    for cache in (DynamicCache(config=model.config), CompressedCache(model, "none")):
        end, parts = 0, []
        for part in ids.split([100, 70, 160], dim=1):
            end += part.shape[1]
            with torch.no_grad():
                given = {"attention_mask": shown[:, :end], "use_cache": True, **named(cache)}
                parts.append(model(part, **given).logits)
        logits.append(torch.cat(parts, 1)[shown.bool()])
    assert (logits[0] - logits[1]).abs().max() <= 1e-4 * logits[0].abs().max()


@NATIVE
def test_other_caches_of_the_model_are_left_to_sdpa_to_the_bit(make_model):
    model = make_model(gemma3(dict(SIZES), "sliding", "full", "sliding", sliding_window=48))
    ids = torch.randint(3, 128, (1, 100), generator=torch.Generator().manual_seed(5))
    with torch.no_grad():
        caches = [DynamicCache(config=model.config) for _ in range(2)]
        wanted = model(ids, **named(caches[0])).logits
        cache = CompressedCache(model, "none")
        assert cache._shared.heap.window == 48
        assert torch.equal(model(ids, **named(caches[1])).logits, wanted)
        own = model(ids, **named(cache)).logits
    assert not torch.equal(own, wanted) and (own - wanted).abs().max() < 1e-4 * wanted.abs().max()
