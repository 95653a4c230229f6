"""A tiny model of every structure of cache that transformers has, made of its own configs."""

from typing import Any

import pytest
import torch
from tiny_configs import INDEXED, KINDS, MADE, SIZES, TextModel
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from kvpact.integrations.transformers.model.facts import layer_facts

_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "expert_num")
_SMALL = {
    "head_dim": 16, **dict.fromkeys(_EXPERTS, 4),
    **dict.fromkeys(("num_experts_per_tok", "linear_num_key_heads"), 2),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 32),
    **dict.fromkeys(("n_shared_experts", "n_group", "topk_group", "n_groups"), 1),
    **dict.fromkeys(("sliding_window", "attention_chunk_size"), 16),
    **dict.fromkeys(("linear_num_value_heads", "linear_num_heads"), 4),
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim", "linear_head_dim"), 16),
    **{"kv_lora_rank": 32, "q_lora_rank": 16, "v_head_dim": 16},
    **dict.fromkeys(("qk_rope_head_dim", "qk_nope_head_dim"), 16),
    **{"mamba_d_state": 8, "ssm_state_size": 8, "mamba_n_groups": 1, "mamba_num_heads": 4},
    **dict.fromkeys(("mamba_d_head", "mamba_head_dim"), 16),
    **{"mamba_chunk_size": 8, "chunk_size": 8, "mamba_n_heads": 8},
    **{"hidden_size_per_layer_input": 16, "vocab_size_per_layer_input": 128}, "global_head_dim": 32,
}  # fmt: skip
"""What makes a model small, where its config has it."""
_HEADS = {"num_key_value_heads": 4}
_OWN: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3_moe": {},
    "smollm3": {},
    "minimax_m2": {},
    "deepseek_v3": _HEADS | {"first_k_dense_replace": 1},
    "gemma2": {},
    "gemma3n_text": {
        "layer_types": [
            "full_attention", "sliding_attention",
            *["full_attention"] * 3,
        ],
        "num_hidden_layers": 5, "num_kv_shared_layers": 2, "laurel_rank": 8,
        "altup_num_inputs": 2, "activation_sparsity_pattern": [0.0] * 5,
    },
    "gemma4_text": {
        "layer_types": ["sliding_attention", *["full_attention"] * 3],
        "num_hidden_layers": 4, "num_kv_shared_layers": 2, "head_dim": 16,
        "global_head_dim": 32, "sliding_window": 16,
    },
    "gpt_oss": {},
    "mimo_v2_flash": {},
    "olmo3": {},
    "cohere2": {},
    "exaone4": {},
    "llama4_text": {},
    "afmoe": {},
    "qwen3_5_text": {},
    "qwen3_5_moe_text": {},
    "kimi_linear": _HEADS | {"num_experts_per_token": 2},
    "bailing_hybrid": _HEADS,
    "olmo_hybrid": {},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "bamba": {"attn_layer_indices": [1]},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"]},
    "nemotron_h": {},
    "zamba2": _HEADS
    | {
        "layers_block_type": ["mamba", "hybrid", "hybrid"],
        "num_hidden_layers": 3,
        "n_mamba_heads": 4,
        "mamba_ngroups": 1,
        "num_mem_blocks": 1,
        "adapter_rank": 8,
    },
    "lfm3": {},
    "zaya": {"num_experts_per_tok": 1},
}  # fmt: skip
NAMES = [*_OWN, *KINDS, *INDEXED, *MADE]
_HIDDEN = {"mistral_large4", "glm5", "minimax_m3"}
"""Models of which transformers has no version with logits."""


def tiny_config(name: str, **more: Any) -> Any:
    """Return the config of a model, by the name of its type or of a maker in `tiny_configs`."""
    for makers in (KINDS, INDEXED, MADE):
        if name in makers:
            made = makers[name](dict(SIZES), **more)
            return made
    if name not in CONFIG_MAPPING:
        pytest.skip(f"this transformers has no {name}")
    kind, own = CONFIG_MAPPING[name], _OWN[name]
    base = kind()
    given = {x: n for x, n in _SMALL.items() if vars(base).get(x) is not None}
    types = vars(base).get("layer_types")
    if types and "layer_types" not in own:  # one of each kind, two at least
        types = list(dict.fromkeys(types))
        given["layer_types"] = (types * 2)[: max(2, len(types))]
        given["num_hidden_layers"] = len(given["layer_types"])
    return kind(**SIZES | given | own)


def tiny_model(name: str, **more: Any) -> Any:
    """Return a model with random weights, large enough that equal tokens mean something."""
    config = tiny_config(name, **more)
    layer_facts(config.get_text_config(decoder=True))  # may refuse this version
    torch.manual_seed(0)
    if name in _HIDDEN:
        model: Any = TextModel(config)
    else:
        try:
            model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
        except ValueError:  # transformers lets it attend by eager alone
            model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    for parameter in model.parameters():
        parameter.data.mul_(1.5)
    return model.eval()
