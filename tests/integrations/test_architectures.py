"""Models of other shapes: what is compressed, what stays native, and that exact means exact."""

import pytest
from tiny_configs import deepseek, gemma3, lfm2
from transformers import Gemma2Config, GPT2Config, GptOssConfig, LlamaConfig, MistralConfig

from kvpact.errors import KVPactError, SpecError
from kvpact.integrations.transformers import CompressedCache, register_attention
from kvpact.integrations.transformers.versions import named

WINDOW = {"head_dim": 16, "sliding_window": 16}
MODELS = {
    "mha": lambda s: LlamaConfig(**s | {"num_key_value_heads": 4}),
    "mqa": lambda s: LlamaConfig(**s | {"num_key_value_heads": 1}),
    "head_dim_80": lambda s: LlamaConfig(**s, head_dim=80),
    "gemma3": lambda s: gemma3(s, "sliding", "sliding", "full"),
    "gemma2_softcap": lambda s: Gemma2Config(
        **s | WINDOW, query_pre_attn_scalar=16, attn_logit_softcapping=2.0
    ),
    "gpt_oss_sinks": lambda s: GptOssConfig(
        **s | WINDOW, num_local_experts=2, num_experts_per_tok=1
    ),
    "lfm2_conv": lfm2,
    "gpt2": lambda s: GPT2Config(
        n_embd=64, n_layer=2, n_head=4, vocab_size=128, bos_token_id=1, eos_token_id=2
    ),
    "deepseek_v3_mla": deepseek,
}
NATIVE = {"gemma3": 2, "gemma2_softcap": 1, "gpt_oss_sinks": 1, "lfm2_conv": 1}
EAGER = ("gemma2_softcap", "gpt_oss_sinks")


@pytest.mark.parametrize("name", MODELS)
def test_exact_cache_gives_the_same_tokens(name, make_model, sizes, prompt, greedy, fallbacks):
    model = make_model(MODELS[name](sizes), "eager" if name in EAGER else "sdpa")
    if name == "gpt_oss_sinks":
        for layer in model.model.layers:
            layer.self_attn.sinks.data.uniform_(-1, 2)
    wanted = model.generate(**prompt, **greedy)
    if name in EAGER:
        register_attention()
        model.set_attn_implementation("kvpact")
    cache = CompressedCache(model.config, "none")
    got, said = fallbacks(lambda: model.generate(**prompt, **greedy, **named(cache)))
    assert got.equal(wanted) and said == []
    layers = cache.stats()["layers"]
    assert layers["native"] == NATIVE.get(name, 0)
    assert layers["compressed"] == len(cache.layers) - layers["native"]
    cache = CompressedCache(model.config, "turboquant:bits=3,center=64,window=8")
    tokens = model.generate(**prompt, **greedy, **named(cache))
    assert cache.stats()["tokens"] == tokens.shape[1] - 1


def test_a_model_without_full_attention_is_refused(sizes):
    told = r"no layer of this model has full attention.* 2 of 'sliding_attention' \(the last tokens"
    with pytest.raises(KVPactError, match=told):
        CompressedCache(MistralConfig(**sizes, sliding_window=16), "none")


def test_recipe_names_layers_of_the_model(llama, prompt):
    cache = CompressedCache(llama.config, {"default": "int:bits=4", "layers": {"-1": "none"}})
    llama(**prompt, **named(cache))
    assert [str(layer.spec) for layer in cache.layers] == ["int:bits=4", "none"]
    assert cache.stats()["spec"] == "mixed"


def test_wrong_arguments(llama):
    with pytest.raises(SpecError, match="'auto' or 'keep'"):
        CompressedCache(llama.config, "none", attention="flash")
    with pytest.raises(SpecError, match="has no option"):
        CompressedCache(llama.config, "turboquant:bit=4")
