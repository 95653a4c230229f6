"""Models with sliding windows and with large key biases."""

import pytest
import torch
import transformers

from kvpact.evaluate import evaluate
from kvpact.integrations.transformers import CompressedCache
from kvpact.recommend import plan, survey

SIZES = {
    "vocab_size": 64, "hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 4,
    "num_key_value_heads": 2, "initializer_range": 0.2,
}  # fmt: skip


@pytest.fixture(scope="module")
def ids():
    return torch.randint(0, 64, (256,), generator=torch.Generator().manual_seed(1))


def test_layers_with_sliding_windows_stay_exact_and_count(ids):
    torch.manual_seed(0)
    config = transformers.Gemma2Config(
        **SIZES, num_hidden_layers=3, head_dim=32, sliding_window=128, attn_logit_softcapping=30.0,
        query_pre_attn_scalar=64, attn_implementation="eager",
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
    )  # fmt: skip
    model = transformers.Gemma2ForCausalLM(config).eval()
    surveyed = survey(model, ids, chunk=128)
    assert sorted(surveyed.seen.layers) == [1] and sorted(surveyed.seen.bounded) == [0, 2]
    found = plan(surveyed, context=8192, budget="40%")
    per_token = 2 * (32 + 32) * 2
    assert found.sizes.covered == 8192 * per_token
    assert found.sizes.native == 2 * 128 * per_token
    assert found.sizes.native < found.recipe_bytes <= found.budget
    assert set(found.layers) == {1} and isinstance(found.recipe, str)
    assert found.num_layers == 3 and model.config._attn_implementation == "eager"
    CompressedCache(model, found.recipe, attention="keep")


@pytest.mark.filterwarnings("ignore:the model's attention is 'eager'")
@pytest.mark.parametrize("config", [
    lambda: transformers.Lfm2Config(
        **SIZES, num_hidden_layers=2, layer_types=["conv", "full_attention"],
    ),
    lambda: transformers.GptOssConfig(
        **SIZES, num_hidden_layers=2, head_dim=16, sliding_window=16, num_local_experts=2,
        num_experts_per_tok=1, attn_implementation="eager",
    ),
    lambda: transformers.GPT2Config(
        n_embd=64, n_layer=2, n_head=4, vocab_size=64, initializer_range=0.2,
    ),
], ids=["lfm2", "gpt_oss", "gpt2"])  # fmt: skip
def test_states_sink_logits_and_learnt_positions_are_no_obstacle(ids, config):
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config()).eval()
    found = plan(survey(model, ids, chunk=128), context=4096, budget="100%")
    row = evaluate(model, ids, ["int:bits=8"], chunk=128).rows[1]
    assert found.of("int:bits=8").predicted == pytest.approx(row.kl_mean, rel=0.4)


def test_large_key_biases_are_named_and_taken_off(ids):
    torch.manual_seed(0)
    config = transformers.Qwen2Config(**SIZES, num_hidden_layers=2)
    model = transformers.Qwen2ForCausalLM(config).eval()
    plain = plan(survey(model, ids, chunk=128), budget="50%")
    assert not any("biases" in note for note in plain.notes)
    with torch.no_grad():
        model.model.layers[1].self_attn.k_proj.bias[3] = 300.0
    found = plan(survey(model, ids, chunk=128), budget="50%")
    (note,) = (note for note in found.notes if "biases" in note)
    assert "layers and norms: 1 (300.0)" in note
    # A bias that is stored apart costs no precision: else keys of layer 1 cost thousands of times
    # as much.
    four, before = (x.of("turboquant:bits=4").key for x in (found, plain))
    assert four[1] / four[0] < 10 * before[1] / before[0]
