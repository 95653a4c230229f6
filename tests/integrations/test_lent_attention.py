"""The attention that models are lent: what it is told of, what it ignores, and in training mode."""

import inspect
import re
from types import SimpleNamespace

import pytest
import torch
from attention_arguments import attention_arguments
from tiny_configs import run
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import DynamicCache, PreTrainedTokenizerFast
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from kvpact import enable
from kvpact.errors import KVPactError
from kvpact.integrations.transformers import CompressedCache, register_attention
from kvpact.integrations.transformers.attention import forward as attention
from kvpact.integrations.transformers.versions import named

OF_ATTENTION = {"scaling", "dropout", "is_causal", "attention_mask", "query", "key", "value"}
HARMLESS = {
    *("cache_params", "cache_position", "deterministic", "encoder_hidden_states", "input_ids"),
    *("inputs_embeds", "logits_to_keep", "mm_token_type_ids", "num_items_in_batch", "head_mask"),
    *("output_attentions", "output_hidden_states", "output_router_logits", "past_key_values"),
    *("position_embeddings", "return_dict", "token_type_ids", "use_cache"),
}
OF_FLASH = {f"{name}_{side}" for name in ("cu_seq_lens", "max_length") for side in "kq"}
NEVER = {f"decoder_{x}" for x in ("attention_mask", "input_ids", "inputs_embeds", "position_ids")}
NEVER |= {"cache", "encoder_outputs", "grid_thw", "reverse"}
"""The walk takes one of two classes in a variable for the other: these have a taker on the way."""
KNOWN = attention.HONOURED | attention.OF_EAGER | OF_ATTENTION | HARMLESS | OF_FLASH | NEVER
UNHEARD_OF = {"request_id": "a1", "cu_seq_lens_q": torch.tensor([0, 9]), "tokenizer": object()}


@pytest.mark.slow
def test_every_argument_that_models_pass_to_attention_is_classified():
    """What a model's own attention honours, and `sdpa` does not, would be ignored in silence."""
    found = attention_arguments()
    unknown = {name: sorted(found[name]) for name in found.keys() - KNOWN}
    assert not unknown, "read what these say: to HONOURED, OF_EAGER, or to what changes nothing"
    # The walk sees what it is to see.
    assert {"indices", "block_indices", "s_aux", "position_ids", "use_cache"} <= found.keys()
    assert "minimax_m3_vl" in found["block_indices"]
    assert len(found["position_ids"]) > 100


def test_what_sdpa_looks_up_is_known():
    looked_up = re.findall(r"kwargs\.get\(\"(\w+)\"", inspect.getsource(sdpa_attention_forward))
    assert looked_up and set(looked_up) <= KNOWN | {"cache"}
    # Another name in its signature has to be honoured, too; pages are no compressed K and V.
    assert {"cache"} >= attention._OF_SDPA


@pytest.mark.parametrize("kind", ["plain", "none", "int:bits=4"])
def test_arguments_that_sdpa_ignores_are_ignored(kind, llama, ids):
    """Over the K and V of other caches, too, while a compressed cache lives."""
    lends = CompressedCache(llama, "none")

    def logits(**more):
        cache = CompressedCache(llama, kind) if kind != "plain" else DynamicCache()
        with torch.no_grad():
            parts = [llama(x, **named(cache), **more).logits for x in ids.split([50, 9, 1], 1)]
        return torch.cat(parts, 1)

    assert llama.config._attn_implementation == "kvpact"
    assert torch.equal(logits(**UNHEARD_OF), logits())
    del lends


def test_other_k_and_v_go_to_sdpa_with_all_that_came(llama, monkeypatch):
    """Continuous batching hands down its pages by name, and reads and writes them there."""
    seen = {}

    def sdpa(*args, **kwargs):
        seen.update(kwargs)
        return args[1].transpose(1, 2), None

    monkeypatch.setattr(attention, "sdpa_attention_forward", sdpa)
    monkeypatch.setattr(attention, "_OF_SDPA", frozenset({"novel"}))
    monkeypatch.setattr(attention, "_REFUSED", frozenset({"novel", "cache"}))
    monkeypatch.setattr(attention, "CACHE", "past_key_values")
    given = {"cache": SimpleNamespace(), "read_index": [1], "write_index": [2], "novel": 3}
    x = torch.ones(1, 2, 3, 4)
    llama.train()
    attention.attention_forward(llama, x, x, x, None, dropout=0.5, **given)
    assert given == seen
    with pytest.raises(KVPactError, match="calls a cache past_key_values: pass"):
        attention.attention_forward(llama, x, x, x, None, cache=DynamicCache())


@pytest.mark.parametrize("tokens", [0, 50])
@pytest.mark.parametrize("name", ["sinks", "novel"])
def test_what_is_not_honoured_is_refused_and_nothing_is_held(name, tokens, llama, ids, monkeypatch):
    monkeypatch.setattr(attention, "_OF_SDPA", frozenset({"novel"}))
    monkeypatch.setattr(attention, "_REFUSED", frozenset({"novel", "sinks"}))
    cache = CompressedCache(llama, "int:bits=4")
    if tokens:
        run(llama, cache, [ids[:, :tokens]])
    with pytest.raises(KVPactError, match=f"passes '{name}' to attention, which 'kvpact' does not"):
        llama(ids[:, tokens:], **named(cache), **{name: torch.ones(1)})
    assert [layer.get_seq_length() for layer in cache.layers] == [tokens] * 2
    run(llama, cache, [ids[:, tokens:]])


def test_enabled_models_generate_with_a_tokenizer_at_hand(llama, ids, greedy):
    """`transformers serve` passes it always, and whoever gives `stop_strings` has to."""
    letters = Tokenizer(models.WordLevel({chr(i): i for i in range(128)}, unk_token="a"))
    letters.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    letters.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=letters)
    wanted = llama.generate(ids[:1], **greedy)
    length = 61 + wanted[0, 60:].tolist().index(wanted[0, 64])
    for more, end in ({}, 72), ({"stop_strings": [chr(wanted[0, 64])]}, length):
        with enable(llama, "none"):
            got = llama.generate(ids[:1], **greedy, tokenizer=tokenizer, **more)
        assert torch.equal(got, wanted[:, :end])


@pytest.mark.parametrize("attention_name", ["auto", "sdpa", "eager"])
@pytest.mark.parametrize("training", [lambda model: model, lambda model: model.model.layers[1]])
def test_training_mode_without_dropout_is_no_other(training, attention_name, llama, ids):
    """As trainers generate, and with a part of a model in training mode."""
    if attention_name != "auto":
        llama.set_attn_implementation(attention_name)
    keep = {"attention": "auto" if attention_name == "auto" else "keep"}

    def logits():
        return run(llama, CompressedCache(llama, "int:bits=4", **keep), ids.split([50, 9, 1], 1))

    wanted = logits()
    training(llama).train()
    assert torch.equal(logits(), wanted)


@pytest.mark.parametrize("tokens", [0, 50])
def test_dropout_in_attention_is_refused_and_nothing_is_held(tokens, llama, ids):
    cache, never = (CompressedCache(llama, "int:bits=4") for _ in range(2))
    if tokens:
        run(llama, cache, [ids[:, :tokens]])
        run(llama, never, [ids[:, :tokens]])
    for layer in llama.model.layers:
        layer.self_attn.attention_dropout = 0.25
    llama.train()
    with pytest.raises(KVPactError, match=r"no dropout: call model.eval\(\), or set .* 0.25, to 0"):
        run(llama, cache, [ids[:, tokens:]])
    assert [layer.get_seq_length() for layer in cache.layers] == [tokens] * 2
    llama.eval()
    assert torch.equal(*(run(llama, x, [ids[:, tokens:]]) for x in (cache, never)))


def test_attention_that_reads_tensors_has_its_dropout(llama, ids):
    register_attention()
    llama.set_attn_implementation("eager")
    for layer in llama.model.layers:
        layer.self_attn.attention_dropout = 0.25
    llama.train()
    made = []
    for cache in (DynamicCache(), CompressedCache(llama, "none", attention="keep")):
        torch.manual_seed(2)
        made.append(run(llama, cache, [ids]))
    assert torch.equal(*made)


def test_training_steps_of_an_enabled_model_are_those_without(llama, ids):
    llama.train()

    def gradient():
        llama.zero_grad()
        llama(ids, labels=ids).loss.backward()
        return llama.model.layers[0].self_attn.k_proj.weight.grad.clone()

    wanted = gradient()
    with enable(llama, "int:bits=4"):
        llama.generate(ids, max_new_tokens=3, pad_token_id=0, eos_token_id=None)
        lends = CompressedCache(llama)
        assert torch.equal(gradient(), wanted)
        with pytest.raises(KVPactError, match="no gradients"):
            llama(ids, labels=ids, **named(lends)).loss.backward()
