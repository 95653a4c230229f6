"""Configs of tiny models that several tests of transformers run."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from transformers import (
    DeepseekV3Config,
    FalconH1Config,
    Gemma3TextConfig,
    InklingTextConfig,
    Lfm2Config,
    PreTrainedConfig,
    Qwen3NextConfig,
)
from transformers.models.dots3_note import Dots3NoteTextConfig

WINDOW = 16
"""Tokens of layers with a window."""
Sizes = dict[str, Any]
LATENT = {
    "kv_lora_rank": 32,
    "q_lora_rank": 16,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 16,
    "v_head_dim": 24,
    "num_key_value_heads": 4,
    "moe_intermediate_size": 32,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 2,
    "n_shared_experts": 1,
}
"""Sizes of the latent attention of DeepSeek-V2, V3 and V3.2."""


def deepseek(sizes: Sizes, config: type[PreTrainedConfig] = DeepseekV3Config, **more: Any) -> Any:
    """Return a DeepSeek that caches latents."""
    return config(**sizes | LATENT | more)


def falcon_h1(sizes: Sizes) -> Any:
    """Return a model whose layers have full attention and a state."""
    state = {"mamba_d_ssm": 64, "mamba_n_heads": 4, "mamba_d_state": 8, "mamba_n_groups": 1}
    return FalconH1Config(**sizes, **state, mamba_chunk_size=8)


def gemma3(sizes: Sizes, *kinds: str, **more: Any) -> Any:
    """Return a model of layers with a window of 16 (``sliding``) and with full attention."""
    types = [f"{kind}_attention" for kind in kinds]
    own = {"head_dim": 16, "sliding_window": 16, "num_hidden_layers": len(types)}
    return Gemma3TextConfig(**sizes | own | more, layer_types=types)


def lfm2(sizes: Sizes) -> Any:
    """Return a model of a convolution and a layer with full attention."""
    return Lfm2Config(**sizes, layer_types=["conv", "full_attention"])


def inkling(sizes):
    return InklingTextConfig(
        **sizes,
        head_dim=16,
        swa_num_attention_heads=4,
        swa_num_key_value_heads=2,
        swa_head_dim=16,
        sliding_window_size=WINDOW,
        d_rel=8,
        rel_extent=64,
        layer_types=["hybrid_sliding", "hybrid"],
        mlp_layer_types=["dense", "dense"],
        logits_mup_width_multiplier=1.0,
    )


def dots3(sizes):
    latent = {"q_lora_rank": 16, "head_dim": 32, "qk_nope_head_dim": 16, "v_head_dim": 16}
    return Dots3NoteTextConfig(
        **{**sizes, "num_key_value_heads": 4, "num_hidden_layers": 3},
        **latent,
        **{f"swa_{name}": value for name, value in latent.items()},
        kv_lora_rank=32,
        swa_kv_lora_rank=48,
        swa_num_attention_heads=4,
        swa_num_key_value_heads=4,
        qk_rope_head_dim=16,
        moe_intermediate_size=32,
        shared_experts_intermediate_size=32,
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_shared_experts=1,
        sliding_window=WINDOW,
        layer_types=["full_attention", "sliding_attention", "full_attention"],
        use_dsa=False,
    )


def qwen3_next(sizes):
    return Qwen3NextConfig(
        **sizes,
        head_dim=16,
        layer_types=["linear_attention", "full_attention"],
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=16,
        linear_value_head_dim=16,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        shared_expert_intermediate_size=32,
    )


KINDS = {
    "inkling": inkling,
    "dots3": dots3,
    "qwen3_next": qwen3_next,
    "lfm2_conv": lfm2,
    "falcon_h1": falcon_h1,
    "gemma3": lambda s: gemma3(s, "sliding", "full"),
}
"""Models with layers of several kinds, by name."""


def run(model: Any, cache: Any, parts: Iterable[Tensor]) -> Tensor:
    """Return the logits of a text that is given to a model in parts."""
    with torch.no_grad():
        steps = [model(part, past_key_values=cache, use_cache=True).logits for part in parts]
    return torch.cat(steps, dim=1)
