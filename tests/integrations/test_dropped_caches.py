"""Phi-3 and those like it: `generate` drops a cache where the rotation switches its factors."""

import copy

import pytest
import torch
from transformers import DynamicCache, Phi3Config, Phi3ForCausalLM, PhimoeConfig, PhimoeForCausalLM

from kvpact import Snapshot
from kvpact.integrations.transformers import CompressedCache, enable, versions
from kvpact.integrations.transformers.versions import CACHE, cache_of, drops_cache_at, named

SHAPE_AND_SEED = (1, 100), 1
if not versions.KEEPS_LATENTS:
    pytest.skip("transformers before 5.15 does this otherwise", allow_module_level=True)

SWITCH = 64
GREEDY = {"max_new_tokens": 8, "do_sample": False, "return_dict_in_generate": True}


@pytest.fixture(params=[(Phi3Config, Phi3ForCausalLM), (PhimoeConfig, PhimoeForCausalLM)])
def model(request):
    config, kind = request.param
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "factor": 4.0, "long_factor": [2.0] * 8}
    rope |= {"short_factor": [1.0] * 8, "original_max_position_embeddings": SWITCH}
    rope |= {"short_mscale": 1.0, "long_mscale": 1.0}
    shape = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 128}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256}
    more = {"pad_token_id": 0, "initializer_range": 0.2, "eos_token_id": None}
    try:
        made = config(**shape, **heads, **more, rope_parameters=rope)
        made.original_max_position_embeddings = SWITCH
        torch.manual_seed(0)
        model = kind(made).eval()
        model(torch.ones(1, 3).long())
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        pytest.skip(f"this transformers names the rotation otherwise: {error!r}")
    model.generation_config.eos_token_id = None
    return model


def test_an_empty_cache_is_not_dropped(model, ids, fallbacks):
    want = model.generate(ids, **GREEDY).sequences
    cache = CompressedCache(model, "none")
    assert cache._dropped_at == SWITCH and not cache
    out, said = fallbacks(lambda: model.generate(ids, **GREEDY, **named(cache)))
    assert torch.equal(out.sequences, want) and said == []
    assert cache_of(out) is cache and cache.get_seq_length() == 107 and cache
    with enable(model, "none"):
        out, said = fallbacks(lambda: model.generate(ids, **GREEDY))
    assert type(cache_of(out)) is CompressedCache and said == []


def test_a_cache_that_is_dropped_is_told_each_time(model, ids, fallbacks):
    short = ids[:, : SWITCH - 3]
    want = model.generate(short, **GREEDY).sequences
    for copied in (lambda cache: cache, copy.deepcopy):
        cache = copied(CompressedCache(model, "none"))
        out, said = fallbacks(lambda: model.generate(short, **GREEDY, **named(cache)))  # noqa: B023
        assert torch.equal(out.sequences, want) and cache_of(out) is not cache
        assert len(said) == 1 and f"after {SWITCH} tokens" in said[0] and "drops" in said[0]
        assert cache.get_seq_length() == SWITCH


def test_a_second_turn_behind_the_switch_is_told(model, ids, fallbacks):
    cache = CompressedCache(model, "none")
    _, said = fallbacks(lambda: model.generate(ids[:, :30], **GREEDY, **named(cache)))
    assert said == []
    out, said = fallbacks(lambda: model.generate(ids, **GREEDY, **named(cache)))
    assert len(said) == 1 and "with its 37 tokens" in said[0]
    exact = DynamicCache(config=model.config)  # transformers 5.19 loses the first turn with it
    model.generate(ids[:, :30], **GREEDY, **named(exact))
    assert torch.equal(out.sequences, model.generate(ids, **GREEDY, **named(exact)).sequences)
    again = CompressedCache(model, "none")
    again.restore(Snapshot.from_bytes(cache.snapshot().to_bytes()))
    assert again.get_seq_length() == 37 and CACHE


def test_other_models_drop_nothing(llama):
    assert drops_cache_at(llama.config) is None and bool(CompressedCache(llama))
