"""A Llama so small that it is made and run in milliseconds, and a tokenizer for it."""

from typing import Any

import torch


def tiny_llama(positions: int, **options: Any) -> Any:
    """Return a Llama of 128 tokens, 2 layers and 4 query heads over 2 KV heads of width 32."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=128, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=32,
        max_position_embeddings=positions, initializer_range=0.2, **options,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


def ascii_tokenizer() -> Any:
    """Return a tokenizer whose tokens are single ASCII characters."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE(vocab={chr(i): i for i in range(128)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([])
    tokenizer.decoder = decoders.Fuse()
    names = ["input_ids", "attention_mask"]
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_input_names=names)
