"""The statistics against plain loops, and what a model's attention is before and after a pass."""

import math

import pytest
import torch
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

from kvpact.errors import KVPactError
from kvpact.integrations.transformers.record import RECORDING, SeenLayer, seen_attention
from kvpact.recommend import ExactAttention


def drawn(*shape, seed):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def plain_loops(seen, keys, values, sinks, window):
    """S of K and the error of V, one query at a time, in double precision."""
    groups = seen.q.shape[1] // seen.k.shape[1]
    tokens = seen.k.shape[2]
    variances, wrong, energy = [], 0.0, 0.0
    for head in range(seen.q.shape[1]):
        k, coded_k, v, coded_v = (
            x[0, head // groups].double() for x in (seen.k, keys, seen.v, values)
        )
        for t in range(tokens // 2, tokens):
            query = seen.q[0, head, t].double() * seen.scale
            logits, errors = [], []
            for i in range(t + 1):
                exact, other = float(query @ k[i]), float(query @ coded_k[i])
                if seen.softcap is not None:
                    cap = seen.softcap
                    exact, other = cap * math.tanh(exact / cap), cap * math.tanh(other / cap)
                logits.append(exact)
                errors.append(other - exact if sinks <= i <= t - window else 0.0)
            sizes = [math.exp(x) for x in logits]
            total = sum(sizes)
            if seen.sink_logits is not None:
                total += math.exp(float(seen.sink_logits[head]))
            p = [x / total for x in sizes]
            mean = sum(a * d for a, d in zip(p, errors, strict=True))
            square = sum(a * d * d for a, d in zip(p, errors, strict=True))
            variances.append(square - mean * mean)
            output = sum(a * v[i] for i, a in enumerate(p))
            error = sum(
                a * (coded_v[i] - v[i]) for i, a in enumerate(p) if sinks <= i <= t - window
            )
            energy += float(output.square().sum())
            wrong += float(error.square().sum()) if isinstance(error, torch.Tensor) else 0.0
    return sum(variances) / len(variances) / 2, wrong / energy


@pytest.mark.parametrize("softcap", [None, 1.5])
@pytest.mark.parametrize("sink", [False, True])
def test_statistics_equal_plain_loops(softcap, sink):
    seen = SeenLayer(
        drawn(1, 4, 20, 6, seed=0),
        drawn(1, 2, 20, 6, seed=1),
        drawn(1, 2, 20, 5, seed=2),
        0.7,
        softcap,
        drawn(4, seed=3) if sink else None,
    )
    keys = seen.k + 0.3 * drawn(1, 2, 20, 6, seed=4)
    values = seen.v + 0.3 * drawn(1, 2, 20, 5, seed=5)
    exact = ExactAttention(seen, sinks=2, window=3)
    s, error = plain_loops(seen, keys, values, 2, 3)
    assert exact.key_statistic(keys) == pytest.approx(s, rel=1e-4)
    assert exact.value_error(values) == pytest.approx(error, rel=1e-4)
    assert s > 1e-3 and error > 1e-3


def test_errors_that_attention_does_not_see_count_for_nothing():
    seen = SeenLayer(*(drawn(1, 2, 40, 8, seed=seed) for seed in range(3)), 0.5)
    exact = ExactAttention(seen, sinks=4, window=10)
    assert exact.key_statistic(seen.k) == 0 == exact.value_error(seen.v)
    changed = seen.k.clone()
    changed[:, :, :4] += 1
    changed[:, :, 30:] += 1  # the last query, 39, sees 30 to 39 exactly
    assert exact.key_statistic(changed) == 0
    changed[:, :, 29] += 1
    assert exact.key_statistic(changed) > 0


@pytest.fixture
def model():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=64, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=16,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


def test_a_pass_sees_the_keys_that_a_cache_would_hold(model):
    ids = torch.randint(0, 64, (50,), generator=torch.Generator().manual_seed(1))
    seen = seen_attention(model, ids)
    cache = DynamicCache(config=model.config)
    with torch.inference_mode():
        model(input_ids=ids[None], past_key_values=cache)
    assert sorted(seen.layers) == [0, 1] and not seen.bounded
    for index, layer in seen.layers.items():
        torch.testing.assert_close(layer.k, cache.layers[index].keys)
        torch.testing.assert_close(layer.v, cache.layers[index].values)
        assert layer.q.shape == (1, 4, 50, 16) and layer.scale == 0.25


def test_attention_is_restored_after_a_pass_and_after_an_error(model, monkeypatch):
    assert model.config._attn_implementation == "sdpa"
    ids = torch.arange(20)
    seen_attention(model, ids)
    assert model.config._attn_implementation == "sdpa"

    during = []

    def fail(*args, **kwargs):
        during.append(model.config._attn_implementation)
        raise ZeroDivisionError

    monkeypatch.setattr(model.model.layers[1].self_attn, "forward", fail)
    with pytest.raises(ZeroDivisionError):
        seen_attention(model, ids)
    assert during == [RECORDING] and model.config._attn_implementation == "sdpa"


def test_a_layer_that_attends_by_itself_is_refused(model, monkeypatch):
    def own(hidden_states, **kwargs):
        return hidden_states, None

    monkeypatch.setattr(model.model.layers[1].self_attn, "forward", own)
    with pytest.raises(KVPactError, match="attention of layers 1 does not go through"):
        seen_attention(model, torch.arange(20))
    assert model.config._attn_implementation == "sdpa"


def test_latents_are_refused(model):
    model.config.kv_lora_rank = 8
    with pytest.raises(KVPactError, match="latents"):
        seen_attention(model, torch.arange(20))
