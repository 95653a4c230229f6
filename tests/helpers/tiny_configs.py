"""Configs of tiny models that several tests of transformers run."""

import gc
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from families import Family
from torch import Tensor
from transformers import AutoModel, DeepseekV3Config, Gemma3TextConfig

from kvpact.integrations.transformers.versions import named

DeepseekV32Config = Family("DeepseekV32Config")
DeepseekV4Config = Family("DeepseekV4Config")
Dots3NoteTextConfig = Family("dots3_note.Dots3NoteTextConfig")
FalconH1Config = Family("FalconH1Config")
Gemma4TextConfig = Family("Gemma4TextConfig")
InklingTextConfig = Family("InklingTextConfig")
Lfm2Config = Family("Lfm2Config")
Qwen3NextConfig = Family("Qwen3NextConfig")
AXK2Config = Family("axk2.configuration_axk2.AXK2Config")
Glm5NextTextConfig = Family("glm5_next.configuration_glm5_next.Glm5NextTextConfig")
GlmMoeDsaConfig = Family("glm_moe_dsa.configuration_glm_moe_dsa.GlmMoeDsaConfig")
HYV4Config = Family("hy_v4.configuration_hy_v4.HYV4Config")
MiniMaxM3VLTextConfig = Family("minimax_m3_vl.MiniMaxM3VLTextConfig")
_MISTRAL = "mistral_large4.configuration_mistral_large4"
MistralLarge4TextConfig = Family(f"{_MISTRAL}.MistralLarge4TextConfig")
Qwen4ExpTextConfig = Family("qwen4_exp.configuration_qwen4_exp.Qwen4ExpTextConfig")

WINDOW = 16
"""Tokens of layers with a window."""
Sizes = dict[str, Any]
SIZES = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 128, "max_position_embeddings": 512, "bos_token_id": 1,
    "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
"""What every tiny config starts from."""
LATENT = {
    "kv_lora_rank": 32, "q_lora_rank": 16, "qk_rope_head_dim": 16, "qk_nope_head_dim": 16,
    "v_head_dim": 24, "num_key_value_heads": 4, "moe_intermediate_size": 32, "n_routed_experts": 4,
    "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 2,
    "n_shared_experts": 1,
}  # fmt: skip
"""Sizes of the latent attention of DeepSeek-V2, V3 and V3.2."""


def deepseek(sizes: Sizes, config: Any = DeepseekV3Config, **more: Any) -> Any:
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


def gemma4_k_eq_v(sizes: Sizes, *kinds: str, **more: Any) -> Any:
    """Return a Gemma 4 whose full layers make keys of values; the last one reuses another's."""
    types = [f"{kind}_attention" for kind in kinds or ("full", "full", "full")]
    own = {"head_dim": 16, "global_head_dim": 32, "num_global_key_value_heads": 2}
    own |= {"sliding_window": WINDOW, "num_hidden_layers": len(types), "num_kv_shared_layers": 1}
    own |= {"hidden_size_per_layer_input": 16, "vocab_size_per_layer_input": 128}
    return Gemma4TextConfig(**sizes | own | more, layer_types=types, attention_k_eq_v=True)


def lfm2(sizes: Sizes) -> Any:
    """Return a model of a convolution and a layer with full attention."""
    return Lfm2Config(**sizes, layer_types=["conv", "full_attention"])


def inkling(sizes):
    return InklingTextConfig(
        **sizes, head_dim=16, swa_num_attention_heads=4, swa_num_key_value_heads=2, swa_head_dim=16,
        sliding_window_size=WINDOW, d_rel=8, rel_extent=64,
        layer_types=["hybrid_sliding", "hybrid"], mlp_layer_types=["dense", "dense"],
        logits_mup_width_multiplier=1.0,
    )  # fmt: skip


def dots3(sizes):
    latent = {"q_lora_rank": 16, "head_dim": 32, "qk_nope_head_dim": 16, "v_head_dim": 16}
    return Dots3NoteTextConfig(
        **{**sizes, "num_key_value_heads": 4, "num_hidden_layers": 3}, **latent,
        **{f"swa_{name}": value for name, value in latent.items()}, kv_lora_rank=32,
        swa_kv_lora_rank=48, swa_num_attention_heads=4, swa_num_key_value_heads=4,
        qk_rope_head_dim=16, moe_intermediate_size=32, shared_experts_intermediate_size=32,
        n_routed_experts=4, num_experts_per_tok=2, n_shared_experts=1, sliding_window=WINDOW,
        layer_types=["full_attention", "sliding_attention", "full_attention"], use_dsa=False,
    )  # fmt: skip


LINEAR = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16,
    "linear_value_head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2,
    "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32,
}  # fmt: skip
"""Sizes of the linear attention and the experts of Qwen3-Next and Qwen4."""


def qwen3_next(sizes):
    return Qwen3NextConfig(
        **sizes, head_dim=16, layer_types=["linear_attention", "full_attention"], **LINEAR
    )


def deepseek_v4(sizes, index_topk=4):
    kinds = "sliding_attention", "heavily_compressed_attention", "compressed_sparse_attention"
    return DeepseekV4Config(
        **{**sizes, "num_hidden_layers": 3}, head_dim=32, q_lora_rank=16, o_groups=2,
        o_lora_rank=16, moe_intermediate_size=32, n_routed_experts=4, num_experts_per_tok=2,
        layer_types=list(kinds), compress_rates={kinds[1]: 8, kinds[2]: 4}, sliding_window=WINDOW,
        index_n_heads=16, index_head_dim=32, index_topk=index_topk,
    )  # fmt: skip


KINDS = {
    "inkling": inkling, "dots3": dots3, "qwen3_next": qwen3_next, "lfm2_conv": lfm2,
    "falcon_h1": falcon_h1, "gemma3": lambda s: gemma3(s, "sliding", "full"),
    "deepseek_v4": deepseek_v4,
}  # fmt: skip
"""Models with layers of several kinds, by name."""

MADE = {"gemma4_k_eq_v": gemma4_k_eq_v}
"""Models that make keys of values, by name."""

INDEX = {"index_head_dim": 32, "index_n_heads": 16, "index_topk": 24}
"""An index of so many heads that no two tokens score alike; it chooses 24 of them."""


def minimax_m3(sizes, **more):
    return MiniMaxM3VLTextConfig(
        **{**sizes, "num_hidden_layers": 3}, head_dim=16, rotary_dim=8, dense_intermediate_size=64,
        shared_intermediate_size=32, num_local_experts=4, num_experts_per_tok=2,
        layer_types=["full_attention", "minimax_m3_sparse", "full_attention"],
        mlp_layer_types=["dense"] * 3, index_n_heads=2,
        **{"index_head_dim": 16, "index_block_size": 8, "index_topk_blocks": 3, **more},
    )  # fmt: skip


def qwen4(sizes, index_topk=24):
    return Qwen4ExpTextConfig(
        **sizes, **LINEAR, head_dim=16, layer_types=["linear_attention", "indexed_attention"],
        indexer_n_heads=16, indexer_kv_heads=1, indexer_head_dim=32, indexer_budget=index_topk,
        indexer_compress_ratio=4, hc_count=2, hc_lowrank=8,
    )  # fmt: skip


def glm5(sizes, index_topk=24):
    return Glm5NextTextConfig(
        **sizes | LATENT | INDEX | {"index_topk": index_topk, "qk_rope_head_dim": 0}, index_kpool=4,
        linear_head_dim=16, linear_num_heads=4,
        layer_types=["linear_attention", "indexed_attention"], hc_mult=2,
    )  # fmt: skip


def latent_indexed(config):
    """Return a function that makes a model of latents and an index, of this class."""
    return lambda sizes, **more: deepseek(sizes, config, **INDEX | more)


INDEXED = {
    "deepseek_v32": latent_indexed(DeepseekV32Config),
    "glm_dsa": latent_indexed(GlmMoeDsaConfig),
    "axk2": latent_indexed(AXK2Config),
    "hunyuan_v4": latent_indexed(HYV4Config),
    "mistral_large4": latent_indexed(MistralLarge4TextConfig),
    "dots3_indexed": latent_indexed(Dots3NoteTextConfig),
    "qwen4": qwen4,
    "glm5": glm5,
    "minimax_m3": minimax_m3,
}
"""Models whose layers choose the tokens they attend to, by name."""


class TextModel(torch.nn.Module):
    """A model without logits: its hidden states are called so."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.model = AutoModel.from_config(config, attn_implementation="sdpa")
        self.config, self.device = self.model.config, self.model.device

    def forward(self, input_ids: Tensor, **options: Any) -> Any:
        """Run the model."""
        output = self.model(input_ids, **options)
        output.logits = output.last_hidden_state
        return output


def run(model: Any, cache: Any, parts: Iterable[Tensor]) -> Tensor:
    """Return the logits of a text that is given to a model in parts."""
    with torch.no_grad():
        steps = [model(part, **named(cache), use_cache=True).logits for part in parts]
    return torch.cat(steps, dim=1)


@contextmanager
def without_collector() -> Iterator[None]:
    """Let nothing but the end of its last reference free what is let go of inside."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@contextmanager
def interrupted(module: torch.nn.Module) -> Iterator[None]:
    """Let the first call of a module end as by Ctrl-C, and take that for what has to come."""

    def stop(*args: Any) -> None:
        raise KeyboardInterrupt

    hook = module.register_forward_pre_hook(stop)
    with pytest.raises(KeyboardInterrupt):
        yield
    hook.remove()
