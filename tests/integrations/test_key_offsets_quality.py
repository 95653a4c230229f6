"""SmolLM2 with the key biases of Qwen2 put into its first and last layer (`make test-slow`)."""

import pytest
import torch

from kvpact.data import book_path
from kvpact.evaluate import evaluate
from kvpact.integrations.models import load_model
from kvpact.integrations.transformers import key_offsets

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]

HEADS, DIM, NORM, PAIRS = 3, 64, 605.0, 8
SPECS = ("turboquant:bits=4", "int:bits=4")


def biases(layers):
    """A bias `[HEADS, DIM]` of that norm, in 8 random RoPE pairs of each head, for each layer."""
    generator = torch.Generator().manual_seed(0)
    for layer in layers:
        bias = torch.zeros(HEADS, DIM)
        for row in bias:
            for pair in torch.randperm(DIM // 2, generator=generator)[:PAIRS].tolist():
                row[[pair, pair + DIM // 2]] = torch.randn(2, generator=generator)
        yield layer, NORM * bias / bias.norm(dim=1, keepdim=True)


def test_the_bias_costs_next_to_nothing():
    """Against the same model without it; queries hardly see those pairs, as in trained models."""
    model, tokenizer = load_model()
    text = book_path().read_text("utf-8")
    ids = torch.tensor(tokenizer(text)["input_ids"][:700])
    last = model.config.num_hidden_layers - 1
    for layer, bias in biases((0, last)):
        queries = model.model.layers[layer].self_attn.q_proj.weight.data.view(-1, DIM, 576)
        queries[:, (bias != 0).any(0)] *= 0.01
    before = {row.spec: row.kl_mean for row in evaluate(model, ids, SPECS, chunk=128).rows}
    for layer, bias in biases((0, last)):
        keys = model.model.layers[layer].self_attn.k_proj
        keys.bias = torch.nn.Parameter(bias.flatten(), requires_grad=False)
    assert key_offsets(model).keys() == {0, last}
    after = {row.spec: row.kl_mean for row in evaluate(model, ids, SPECS, chunk=128).rows}
    for spec in SPECS:
        assert before[spec] > 1e-5
        assert after[spec] < 1.3 * before[spec]
