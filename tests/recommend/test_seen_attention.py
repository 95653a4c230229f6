"""What a model's attention shows, may be given instead, and is afterwards."""

import pytest
import torch
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

from kvpact.errors import KVPactError
from kvpact.integrations.transformers.attention.forward import attention_forward
from kvpact.integrations.transformers.attention.seen import SHOWN, _shown, seen_attention
from kvpact.integrations.transformers.versions import named


@pytest.fixture
def model():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=64, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=16,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


def run(model, ids, **options):
    with torch.no_grad():
        return model(input_ids=ids[None], **options).logits[0]


def test_a_pass_shows_the_keys_that_a_cache_holds_and_the_new_queries(model):
    ids = torch.randint(0, 64, (50,), generator=torch.Generator().manual_seed(1))
    cache = DynamicCache(config=model.config)
    with seen_attention(model) as seen:
        for part in ids.split(30):
            run(model, part, **named(cache))
            seen.check()
    assert sorted(seen.layers) == [0, 1] and not seen.bounded
    for index, layer in seen.layers.items():
        torch.testing.assert_close(layer.k, cache.layers[index].keys)
        torch.testing.assert_close(layer.v, cache.layers[index].values)
        assert layer.q.shape == (1, 4, 20, 16) and layer.k.shape == (1, 2, 50, 16)


def test_layers_attend_to_what_is_read_instead(model):
    ids = torch.arange(20)
    exact = run(model, ids)
    with seen_attention(model) as seen:
        torch.testing.assert_close(run(model, ids), exact)
        seen.read = lambda layer, k, v: (k, v * (layer != 1))
        changed = run(model, ids)
        seen.read = None
        torch.testing.assert_close(run(model, ids), exact)
    assert (changed - exact).abs().max() > 1e-3
    with torch.no_grad():
        model.model.layers[1].self_attn.v_proj.weight.zero_()
    torch.testing.assert_close(run(model, ids), changed)


def test_attention_is_restored_after_a_pass_and_after_an_error(model, monkeypatch):
    assert model.config._attn_implementation == "sdpa"
    with seen_attention(model):
        run(model, torch.arange(20))
    assert model.config._attn_implementation == "sdpa"

    during = []

    def fail(*args, **kwargs):
        during.append(model.config._attn_implementation)
        raise ZeroDivisionError

    monkeypatch.setattr(model.model.layers[1].self_attn, "forward", fail)
    with pytest.raises(ZeroDivisionError), seen_attention(model):
        run(model, torch.arange(20))
    assert during == [SHOWN] and model.config._attn_implementation == "sdpa"


def test_a_layer_that_attends_by_itself_is_refused(model, monkeypatch):
    def own(hidden_states, **kwargs):
        return hidden_states, None

    monkeypatch.setattr(model.model.layers[1].self_attn, "forward", own)
    with seen_attention(model) as seen:
        run(model, torch.arange(20))
        with pytest.raises(KVPactError, match="attention of layers 1 does not go through"):
            seen.check()


def test_latents_are_refused(model):
    model.config.kv_lora_rank = 8
    with pytest.raises(KVPactError, match="latents"), seen_attention(model):
        pass


@pytest.mark.parametrize("masked", [None, "causal", "additive"])
def test_attention_with_gradients_equals_that_without(masked):
    draw = torch.Generator().manual_seed(0)
    sizes = ((4, 6), (2, 9), (2, 9))
    q, k, v = (torch.randn(1, heads, n, 8, generator=draw) for heads, n in sizes)
    options = {"scaling": 0.3, "softcap": 2.0, "s_aux": torch.randn(4, generator=draw)}
    mask = None
    if masked:
        mask = (torch.arange(9) <= torch.arange(3, 9)[:, None])[None, None]
    if masked == "additive":
        mask = torch.where(mask, 0.0, torch.finfo(torch.float32).min)
    module = torch.nn.Module().eval()
    expected = attention_forward(module, q, k, v, mask, **options)[0]
    leaf = k.clone().requires_grad_()
    found = _shown(module, q, leaf, v, mask, **options)[0]
    torch.testing.assert_close(found, expected)
    (gradient,) = torch.autograd.grad(found.square().sum(), leaf)
    assert gradient.abs().min() > 0
    if masked is None:
        options["sliding_window"] = 4
        expected = attention_forward(module, q, k, v, None, **options)[0]
        torch.testing.assert_close(_shown(module, q, leaf, v, None, **options)[0], expected)
