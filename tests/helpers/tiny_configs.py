"""Configs of tiny models that several tests of transformers run."""

from typing import Any

from transformers import (
    DeepseekV3Config,
    FalconH1Config,
    Gemma3TextConfig,
    Lfm2Config,
    PreTrainedConfig,
)

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
