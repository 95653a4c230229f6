"""What most people run, on whichever transformers they have: six families, and no warning."""

import logging
import warnings

import pytest
import torch
from families import Family
from tiny_configs import SIZES, deepseek, gemma3
from transformers import LlamaConfig, MistralConfig, Qwen2Config

from kvpact.integrations.transformers import CompressedCache, disable, enable
from kvpact.integrations.transformers.versions import named

GPT_OSS = {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 16, "head_dim": 16}
FAMILIES = {
    "llama": lambda: LlamaConfig(**SIZES),
    "qwen2": lambda: Qwen2Config(**SIZES),
    "mistral": lambda: MistralConfig(**SIZES, sliding_window=None),
    "gemma3": lambda: gemma3(SIZES, "sliding", "full"),
    "gpt_oss": lambda: Family("GptOssConfig")(**SIZES, **GPT_OSS),
    "deepseek_v3": lambda: deepseek(SIZES),
}


@pytest.mark.parametrize("name", FAMILIES)
def test_batches_beams_enabled_models_and_snapshots(name, make_model, prompt, greedy, caplog):
    model = make_model(FAMILIES[name](), "eager" if name == "gpt_oss" else "sdpa")
    ids = prompt["input_ids"][1:]
    wanted = model.generate(**prompt, **greedy), model.generate(ids, num_beams=3, **greedy)
    with warnings.catch_warnings(), caplog.at_level(logging.WARNING):
        warnings.simplefilter("error", FutureWarning)
        cache = CompressedCache(model, "none")
        assert torch.equal(model.generate(**prompt, **greedy, **named(cache)), wanted[0])
        cache = CompressedCache(model, "none")
        assert torch.equal(model.generate(ids, num_beams=3, **greedy, **named(cache)), wanted[1])
        enable(model, "none")
        assert torch.equal(model.generate(**prompt, **greedy), wanted[0])
        disable(model)
        cache = CompressedCache(model, "int:bits=8")
        with torch.no_grad():
            model(ids[:, :39], **named(cache))
            other = CompressedCache(model, "int:bits=8")
            other.restore(cache.snapshot())
            assert other.get_seq_length() == 39
            step = [model(ids[:, 39:], **named(x)).logits for x in (cache, other)]
        assert torch.equal(*step)
    said = [r.getMessage() for r in caplog.records if "deprecated" in r.getMessage()]
    assert not said
