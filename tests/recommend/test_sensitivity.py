"""Gradients and shrinkage against KLs that are measured, and sums of squares against loops."""

import pytest
import torch
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

from kvpact.integrations.transformers.attention.seen import Seen, SeenLayer, seen_attention
from kvpact.integrations.transformers.versions import named
from kvpact.recommend import Sensitivity, measure_sensitivity
from kvpact.recommend.gradients import SINKS, WINDOW

CHUNK, TOKENS = 96, 192
CODED = slice(SINKS, CHUNK - WINDOW)


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=48, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=16, initializer_range=0.3,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


@pytest.fixture(scope="module")
def ids():
    return torch.randint(0, 48, (TOKENS,), generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module")
def found(model, ids):
    return measure_sensitivity(model, ids, chunk=CHUNK, draws=400)


def measured_kl(model, ids, read):
    """Mean KL of the second chunk if layers read something else of the first."""
    cache = DynamicCache(config=model.config)
    logits = []
    with torch.no_grad(), seen_attention(model) as seen:
        for other in (None, read):
            cache = DynamicCache(config=model.config)
            seen.read = None
            model(input_ids=ids[None, :CHUNK], **named(cache))
            seen.read = other
            out = model(input_ids=ids[None, CHUNK:], **named(cache)).logits[0]
            logits.append(out.double().log_softmax(-1))
    exact, changed = logits
    return float((exact.exp() * (exact - changed)).sum(-1).mean())


@pytest.mark.parametrize(("side", "layer", "head"), [("key", 0, 1), ("key", 1, 0), ("value", 1, 1)])
def test_an_error_of_one_token_costs_the_kl_that_is_measured(model, ids, found, side, layer, head):
    place = "key", "value"
    error = torch.zeros(1, 2, TOKENS, 16)
    draw = torch.Generator().manual_seed(3)
    error[0, head, 11] = 0.03 * torch.randn(16, generator=draw)

    def read(index, k, v):
        pair = [k, v]
        if index == layer:
            pair[place.index(side)] = pair[place.index(side)] + error
        return tuple(pair)

    seen = found.seen.layers[layer]
    coded = (seen.k if side == "key" else seen.v) + error
    cost, expected = found.noise(layer, side, coded).mean(1)
    assert float(cost) == pytest.approx(measured_kl(model, ids, read), rel=0.2)
    assert float(cost) > 1e-10 and float(expected) > 0


def test_shorter_values_cost_the_kl_that_is_measured(model, ids, found):
    def read(index, k, v):
        v = v.clone()
        v[:, :, CODED] *= 0.98
        return k, v

    w = sum(found.shrinkage.values())
    assert w**2 * 0.02**2 == pytest.approx(measured_kl(model, ids, read), rel=0.05)
    shorter = {i: 0.9 * x.v for i, x in found.seen.layers.items()}
    told = sum(found.shrunk(i, v) for i, v in shorter.items())
    assert told == pytest.approx(0.1 * w, rel=1e-4)
    assert all(share > 0 for share in found.shrinkage.values())


def test_exact_tokens_have_no_gradients(found):
    assert found.scored == TOKENS - CHUNK
    for side in (found.key, found.value):
        shape = (400, 2, CODED.stop - CODED.start, 16)
        shapes = {layer: [x.shape for x in parts] for layer, parts in side.items()}
        assert shapes == {0: [shape], 1: [shape]}
    exact = found.seen.layers[0]
    wrong = exact.k.clone()
    wrong[:, :, : CODED.start] += 1
    wrong[:, :, CODED.stop :] += 1
    assert float(found.noise(0, "key", wrong)[0].sum()) == 0


def test_a_model_is_left_as_it_was_and_draws_repeat(model, ids):
    first, again = (measure_sensitivity(model, ids, chunk=CHUNK, draws=2, seed=5) for _ in range(2))
    other = measure_sensitivity(model, ids, chunk=CHUNK, draws=2, seed=6)
    assert torch.equal(first.key[1][0], again.key[1][0])
    assert not torch.equal(first.key[1][0], other.key[1][0])
    assert all(p.grad is None for p in model.parameters()) and not model.training
    assert model.config._attn_implementation == "sdpa"


def test_squares_are_taken_by_head_for_keys_and_by_token_for_values():
    draw = torch.Generator().manual_seed(0)
    k, v = (torch.randn(1, 2, 20, 4, generator=draw) for _ in range(2))
    wrong_k, wrong_v = (x + 0.1 * torch.randn(x.shape, generator=draw) for x in (k, v))
    parts = [torch.randn(3, 2, tokens, 4, generator=draw).bfloat16() for tokens in (5, 12)]
    seen = Seen(layers={0: SeenLayer(k, k, v)})
    found = Sensitivity(seen, {0: parts}, {0: parts}, {0: 2.0}, scored=7)
    key, value, mean_key = ([0.0] * 3 for _ in range(3))
    for part in parts:
        for d in range(3):
            for h in range(2):
                whole = 0.0
                for t in range(part.shape[2]):
                    g, i = part[d, h, t].double(), SINKS + t
                    whole += float(g @ (wrong_k - k)[0, h, i].double())
                    value[d] += float(g @ (wrong_v - v)[0, h, i].double()) ** 2 / 14
                    energy = (wrong_k - k)[0, h, SINKS:].double().square().mean(0)
                    mean_key[d] += float(g.square() @ energy) / 14
                key[d] += whole**2 / 14
    told = found.noise(0, "key", wrong_k)
    torch.testing.assert_close(told, torch.tensor([key, mean_key]), rtol=1e-4, atol=0)
    told = found.noise(0, "value", wrong_v)
    torch.testing.assert_close(told[0], torch.tensor(value), rtol=1e-4, atol=0)
    share = 1 - (wrong_v * v)[:, :, SINKS:].sum() / v[:, :, SINKS:].square().sum()
    assert found.shrunk(0, wrong_v) == pytest.approx(2 * float(share), rel=1e-4)
