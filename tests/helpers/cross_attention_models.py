"""Tiny random models with cross-attention, and what they are given."""

import torch
import transformers

WIDTH = 32
SIZES = {
    "t5": {
        "d_model": WIDTH, "d_kv": 16, "d_ff": 64, "num_layers": 2, "num_heads": 2,
        "vocab_size": 64, "decoder_start_token_id": 0,
    },
    "bart": {
        "vocab_size": 64, "d_model": WIDTH, "encoder_layers": 2,
        "encoder_attention_heads": 2, "decoder_attention_heads": 2, "encoder_ffn_dim": 64,
        "decoder_ffn_dim": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
        "decoder_start_token_id": 3, "forced_eos_token_id": None,
    },
    "gemma": {
        "vocab_size": 64, "hidden_size": WIDTH, "intermediate_size": 64,
        "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16,
        "sliding_window": 8, "num_hidden_layers": 2,
    },
}  # fmt: skip


def t5gemma(layers):
    kinds = ["sliding_attention", "full_attention"][-layers:]
    decoder = {**SIZES["gemma"], "num_hidden_layers": layers, "layer_types": kinds}
    config = transformers.T5GemmaConfig(encoder=SIZES["gemma"], decoder=decoder, vocab_size=64)
    return transformers.T5GemmaForConditionalGeneration(config)


PAIRED = {
    "t5": lambda n: transformers.T5ForConditionalGeneration(
        transformers.T5Config(**SIZES["t5"], num_decoder_layers=n)
    ),
    "mt5": lambda n: transformers.MT5ForConditionalGeneration(
        transformers.MT5Config(**SIZES["t5"], num_decoder_layers=n)
    ),
    "t5gemma": t5gemma,
    "bart": lambda n: transformers.BartForConditionalGeneration(
        transformers.BartConfig(**SIZES["bart"], decoder_layers=n)
    ),
    "marian": lambda n: transformers.MarianMTModel(
        transformers.MarianConfig(**SIZES["bart"], decoder_layers=n)
    ),
    "whisper": lambda n: transformers.WhisperForConditionalGeneration(
        transformers.WhisperConfig(
            **SIZES["bart"], decoder_layers=n, num_mel_bins=8, max_source_positions=20
        )
    ),
}
DECODERS = {
    "bart": lambda n: transformers.BartForCausalLM(
        transformers.BartConfig(**SIZES["bart"], decoder_layers=n)
    ),
    "trocr": lambda n: transformers.TrOCRForCausalLM(
        transformers.TrOCRConfig(
            vocab_size=64, d_model=WIDTH, cross_attention_hidden_size=WIDTH,
            decoder_layers=n, decoder_attention_heads=2, decoder_ffn_dim=64,
        ),
    ),
    "bert": lambda n: transformers.BertLMHeadModel(
        transformers.BertConfig(
            vocab_size=64, hidden_size=WIDTH, num_attention_heads=2, intermediate_size=64,
            num_hidden_layers=n, is_decoder=True, add_cross_attention=True,
        ),
    ),
}  # fmt: skip


def made(model, name, layers):
    torch.manual_seed(0)
    model = model[name](layers).eval()
    for parameter in model.parameters():
        parameter.data.mul_(2)
    return model


def source(name):
    generator = torch.Generator().manual_seed(1)
    if name == "whisper":
        return {"input_features": torch.randn(2, 8, 40, generator=generator)}
    return {"input_ids": torch.randint(3, 64, (2, 20), generator=generator)}


def target(tokens):
    return torch.randint(3, 64, (2, tokens), generator=torch.Generator().manual_seed(2))


def in_pair(cache):
    return transformers.EncoderDecoderCache(cache, transformers.DynamicCache())


def lengths(cache, layers):
    return [cache.get_seq_length(layer) for layer in range(layers)]
