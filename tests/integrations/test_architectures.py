"""Models of other shapes: what is compressed, what stays native, and that exact means exact."""

import pytest
import torch
from transformers import (
    DeepseekV3Config,
    DynamicCache,
    FalconConfig,
    Gemma2Config,
    Gemma3TextConfig,
    GPT2Config,
    GptOssConfig,
    Lfm2Config,
    LlamaConfig,
    MistralConfig,
)

from kvpact.errors import KVPactError, SpecError
from kvpact.integrations.transformers import CompressedCache, register_attention

FUSED = {
    "mha": lambda s: LlamaConfig(**{**s, "num_key_value_heads": 4}),
    "mqa": lambda s: LlamaConfig(**{**s, "num_key_value_heads": 1}),
    "head_dim_80": lambda s: LlamaConfig(**s, head_dim=80),
    "gemma3": lambda s: Gemma3TextConfig(
        **{**s, "num_hidden_layers": 3},
        head_dim=16,
        sliding_window=16,
        layer_types=["sliding_attention", "sliding_attention", "full_attention"],
    ),
    "gemma2_softcap": lambda s: Gemma2Config(
        **s,
        head_dim=16,
        sliding_window=16,
        query_pre_attn_scalar=16,
        attn_logit_softcapping=2.0,
    ),
    "gpt_oss_sinks": lambda s: GptOssConfig(
        **s, head_dim=16, sliding_window=16, num_local_experts=2, num_experts_per_tok=1
    ),
    "lfm2_conv": lambda s: Lfm2Config(**s, layer_types=["conv", "full_attention"]),
    "gpt2": lambda s: GPT2Config(
        n_embd=64, n_layer=2, n_head=4, vocab_size=128, bos_token_id=1, eos_token_id=2
    ),
    "deepseek_v3_mla": lambda s: DeepseekV3Config(
        **{**s, "num_key_value_heads": 4},
        moe_intermediate_size=32,
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_group=2,
        topk_group=1,
        kv_lora_rank=32,
        q_lora_rank=16,
        qk_rope_head_dim=16,
        qk_nope_head_dim=16,
        v_head_dim=16,
        first_k_dense_replace=2,
        n_shared_experts=1,
    ),
}
MATERIALISED = {
    "falcon": lambda s: FalconConfig(
        hidden_size=64, num_hidden_layers=2, num_attention_heads=4, vocab_size=128, alibi=False
    ),
}
NATIVE = {"gemma3": 2, "gemma2_softcap": 1, "gpt_oss_sinks": 1, "lfm2_conv": 1}
EAGER = ("gemma2_softcap", "gpt_oss_sinks")


@pytest.mark.parametrize("name", FUSED)
def test_exact_cache_gives_the_same_tokens(
    name, make_model, sizes, prompt, greedy, fallbacks, monkeypatch
):
    model = make_model(FUSED[name](sizes), "eager" if name in EAGER else "sdpa")
    if name == "gpt_oss_sinks":
        for layer in model.model.layers:
            layer.self_attn.sinks.data.uniform_(-1, 2)
    wanted = model.generate(**prompt, **greedy)
    if name in EAGER:
        register_attention()
        model.set_attn_implementation("kvpact")
    cache = CompressedCache(model.config, "none")
    got, said = fallbacks(lambda: model.generate(**prompt, **greedy, past_key_values=cache))
    assert torch.equal(wanted, got)
    assert said == []
    layers = cache.stats()["layers"]
    assert layers["native"] == NATIVE.get(name, 0)
    assert layers["compressed"] == len(cache.layers) - layers["native"]


@pytest.mark.parametrize("name", MATERIALISED)
def test_models_that_touch_k_and_v_fall_back_and_say_so_once(
    name, make_model, sizes, prompt, greedy, fallbacks
):
    model, mask = make_model(MATERIALISED[name](sizes)), prompt["attention_mask"]
    cache = CompressedCache(model.config, "none")

    def run(held):
        with torch.no_grad():
            parts = [
                model(
                    prompt["input_ids"][:, start : start + 8],
                    attention_mask=mask[:, : start + 8],
                    past_key_values=held,
                ).logits
                for start in range(0, 40, 8)
            ]
        return torch.cat(parts, dim=1)

    wanted = run(DynamicCache(config=model.config))
    got, said = fallbacks(lambda: run(cache))
    assert torch.allclose(got[mask == 1], wanted[mask == 1], atol=1e-4, rtol=1e-4)
    assert len(said) == 1
    assert "decompressed" in said[0]


@pytest.mark.parametrize("name", [*FUSED, *MATERIALISED])
def test_compressed_cache_generates(name, make_model, sizes, prompt, greedy):
    model = make_model((FUSED | MATERIALISED)[name](sizes), "eager" if name in EAGER else "sdpa")
    register_attention()
    if name != "falcon":
        model.set_attn_implementation("kvpact")
    cache = CompressedCache(model.config, "turboquant:bits=3,center=64,window=8")
    tokens = model.generate(**prompt, **greedy, past_key_values=cache)
    assert tokens.shape == (2, 40 + greedy["max_new_tokens"])
    assert cache.stats()["tokens"] == tokens.shape[1] - 1


def test_a_model_without_full_attention_is_refused(sizes):
    config = MistralConfig(**sizes, sliding_window=16)
    with pytest.raises(KVPactError, match="no layer of this model has full attention"):
        CompressedCache(config, "none")


def test_recipe_names_layers_of_the_model(llama, prompt):
    cache = CompressedCache(llama.config, {"default": "int:bits=4", "layers": {"-1": "none"}})
    llama(**prompt, past_key_values=cache)
    assert [str(layer.spec) for layer in cache.layers] == ["int:bits=4", "none"]
    assert cache.stats()["spec"] == "mixed"


def test_wrong_arguments(llama):
    with pytest.raises(SpecError, match="'auto' or 'keep'"):
        CompressedCache(llama.config, "none", attention="flash")
    with pytest.raises(SpecError, match="has no option"):
        CompressedCache(llama.config, "turboquant:bit=4")
