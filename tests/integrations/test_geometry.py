"""`CacheGeometry.from_config`: what a config of transformers says of K and V."""

from importlib.util import find_spec

import pytest
import torch
from tiny_configs import deepseek, falcon_h1, gemma3, lfm2
from transformers import CONFIG_MAPPING, Gemma3Config, LlamaConfig

from kvpact import CacheGeometry
from kvpact.errors import GeometryError
from kvpact.geometry import _ALIKE
from kvpact.integrations.transformers.layers.shapes import layer_shapes

SIZES = {
    # No memory is taken; the largest default id of a token is below the size of the vocabulary.
    "vocab_size": 200_000, "hidden_size": 96, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2,
}  # fmt: skip


@pytest.mark.parametrize("kind", sorted({*_ALIKE} - {"deepseek_v2", "gemma3_text"}))
def test_it_is_what_the_layers_of_the_model_hold(kind):
    experts = "moe" in kind or kind in ("deepseek_v3", "gpt_oss", "mixtral")
    if experts and find_spec("transformers.integrations.moe") is None:
        pytest.skip("these experts ask which tokens they get, which has no answer without weights")
    more = {"num_experts_per_tok": 1} if "moe" in kind or kind in ("gpt_oss", "mixtral") else {}
    if kind == "gpt_oss":
        more |= {"layer_types": ["sliding_attention", "full_attention"]}
    config = deepseek(SIZES) if kind == "deepseek_v3" else CONFIG_MAPPING[kind](**SIZES | more)
    found = CacheGeometry.from_config(config, torch.bfloat16)
    if not hasattr(config, "pad_token_id"):
        pytest.skip("StableLM of transformers 5.0 makes no model of its own config")
    shapes = layer_shapes(config, torch.bfloat16)
    if found.latent and not shapes[0].latent:
        pytest.skip("before 5.15 transformers caches keys and values made of the latents")
    assert found.num_layers == len(shapes) == 2
    for shape in shapes:
        assert (shape.heads, shape.key_dim) == (found.num_kv_heads, found.head_dim)
        assert (shape.value_dim, shape.latent) == (found.value_dim, found.latent)
    assert found.dtype is torch.bfloat16


def test_a_config_file_and_the_language_model_of_a_larger_one():
    config = LlamaConfig(**SIZES, head_dim=40)
    expected = CacheGeometry(2, 2, 40)
    assert CacheGeometry.from_config(config) == expected
    assert CacheGeometry.from_config(config.to_dict()) == expected
    part = gemma3(SIZES, "sliding", "full")
    whole = Gemma3Config(text_config=part)
    for given in (part, whole, whole.to_dict()):
        assert CacheGeometry.from_config(given) == CacheGeometry(2, 2, 16)


@pytest.mark.parametrize("config", [
    falcon_h1(SIZES), lfm2(SIZES), {"model_type": "llama"}, {},
], ids=["hybrid", "convolutions", "no sizes", "nothing"])  # fmt: skip
def test_what_it_does_not_know_is_refused_with_what_to_write(config):
    with pytest.raises(GeometryError, match=r"write CacheGeometry\(num_layers, num_kv_heads"):
        CacheGeometry.from_config(config)
