"""Models with cross-attention: exact in a pair of caches; a single one is refused, and kept."""

import copy

import pytest
import torch
from transformers import (
    BartConfig,
    BartForCausalLM,
    BartForConditionalGeneration,
    BertConfig,
    BertLMHeadModel,
    DynamicCache,
    EncoderDecoderCache,
    GPT2Config,
    GPT2LMHeadModel,
    MarianConfig,
    MarianMTModel,
    MT5Config,
    MT5ForConditionalGeneration,
    T5Config,
    T5ForConditionalGeneration,
    T5GemmaConfig,
    T5GemmaForConditionalGeneration,
    TrOCRConfig,
    TrOCRForCausalLM,
    WhisperConfig,
    WhisperForConditionalGeneration,
)

from kvpact import CacheGeometry, PagedKVCache
from kvpact.errors import GeometryError, KVPactError
from kvpact.integrations.transformers import CompressedCache, PagedBatch, enable

WIDTH = 32
SIZES = {
    "t5": {
        "d_model": WIDTH,
        "d_kv": 16,
        "d_ff": 64,
        "num_layers": 2,
        "num_heads": 2,
        "vocab_size": 64,
        "decoder_start_token_id": 0,
    },
    "bart": {
        "vocab_size": 64,
        "d_model": WIDTH,
        "encoder_layers": 2,
        "encoder_attention_heads": 2,
        "decoder_attention_heads": 2,
        "encoder_ffn_dim": 64,
        "decoder_ffn_dim": 64,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "decoder_start_token_id": 3,
        "forced_eos_token_id": None,
    },
    "gemma": {
        "vocab_size": 64,
        "hidden_size": WIDTH,
        "intermediate_size": 64,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "sliding_window": 8,
        "num_hidden_layers": 2,
    },
}


def t5gemma(layers):
    kinds = ["sliding_attention", "full_attention"][-layers:]
    decoder = {**SIZES["gemma"], "num_hidden_layers": layers, "layer_types": kinds}
    config = T5GemmaConfig(encoder=SIZES["gemma"], decoder=decoder, vocab_size=64)
    return T5GemmaForConditionalGeneration(config)


PAIRED = {
    "t5": lambda n: T5ForConditionalGeneration(T5Config(**SIZES["t5"], num_decoder_layers=n)),
    "mt5": lambda n: MT5ForConditionalGeneration(MT5Config(**SIZES["t5"], num_decoder_layers=n)),
    "t5gemma": t5gemma,
    "bart": lambda n: BartForConditionalGeneration(BartConfig(**SIZES["bart"], decoder_layers=n)),
    "marian": lambda n: MarianMTModel(MarianConfig(**SIZES["bart"], decoder_layers=n)),
    "whisper": lambda n: WhisperForConditionalGeneration(
        WhisperConfig(**SIZES["bart"], decoder_layers=n, num_mel_bins=8, max_source_positions=20)
    ),
}
DECODERS = {
    "bart": lambda n: BartForCausalLM(BartConfig(**SIZES["bart"], decoder_layers=n)),
    "trocr": lambda n: TrOCRForCausalLM(
        TrOCRConfig(
            vocab_size=64,
            d_model=WIDTH,
            cross_attention_hidden_size=WIDTH,
            decoder_layers=n,
            decoder_attention_heads=2,
            decoder_ffn_dim=64,
        )
    ),
    "bert": lambda n: BertLMHeadModel(
        BertConfig(
            vocab_size=64,
            hidden_size=WIDTH,
            num_attention_heads=2,
            intermediate_size=64,
            num_hidden_layers=n,
            is_decoder=True,
            add_cross_attention=True,
        )
    ),
}
both_depths = pytest.mark.parametrize("layers", [1, 2])
every_model = pytest.mark.parametrize("name", PAIRED)


@pytest.fixture(autouse=True)
def without_gradients():
    with torch.no_grad():
        yield


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
    return EncoderDecoderCache(cache, DynamicCache())


def lengths(cache, layers):
    return [cache.get_seq_length(layer) for layer in range(layers)]


@both_depths
@every_model
def test_a_pair_and_enable_give_the_exact_tokens(name, layers, greedy):
    model, given = made(PAIRED, name, layers), source(name)
    greedy = {**greedy, "max_new_tokens": 12}
    wanted = model.generate(**given, **greedy)
    pair = in_pair(CompressedCache(model, "none"))
    assert torch.equal(model.generate(**given, **greedy, past_key_values=pair), wanted)
    with enable(model, "none"):
        assert torch.equal(model.generate(**given, **greedy), wanted)


@pytest.mark.parametrize("attention", ["auto", "keep"])
@both_depths
@every_model
def test_a_single_cache_is_refused_and_as_before(name, layers, attention, greedy):
    """T5 asks for a layer's length before each attention: no sign of a new call."""
    model, given = made(PAIRED, name, layers), source(name)
    ids = target(4)
    cache = CompressedCache(model, "none", attention=attention)
    for _ in range(2):
        with pytest.raises(GeometryError, match=r"EncoderDecoderCache.*enable"):
            model(**given, decoder_input_ids=ids, past_key_values=cache)
        # T5Gemma's own `generate` refuses it before kvpact does.
        with pytest.raises(ValueError, match="EncoderDecoderCache"):
            model.generate(**given, **greedy, past_key_values=cache)
        assert lengths(cache, layers) == [0] * layers
    wanted = model(**given, decoder_input_ids=ids).logits
    pair = in_pair(cache)
    parts = [
        model(**given, decoder_input_ids=part, past_key_values=pair).logits
        for part in ids.split(2, dim=1)
    ]
    assert torch.allclose(torch.cat(parts, 1), wanted, atol=1e-4)


@pytest.mark.parametrize("spec", ["int:bits=4,sinks=4,window=8", "kivi:bits=2,window=16"])
@both_depths
@every_model
def test_a_filled_cache_is_as_before_a_refusal(name, layers, spec):
    """Exactly, although the refused tokens had pushed others out of the window."""
    model, given, ids = made(PAIRED, name, layers), source(name), target(60)

    def filled():
        pair = in_pair(CompressedCache(model, spec))
        model(**given, decoder_input_ids=ids[:, :50], past_key_values=pair)
        return pair

    pair, untouched = filled(), filled()
    cache = pair.self_attention_cache
    for part in (ids[:, 50:51], ids[:, 50:]):
        with pytest.raises(GeometryError, match="EncoderDecoderCache"):
            model(**given, decoder_input_ids=part, past_key_values=cache)
        assert lengths(cache, layers) == [50] * layers
    for part in (ids[:, 50:51], ids[:, 51:]):
        got, wanted = (
            model(**given, decoder_input_ids=part, past_key_values=x).logits
            for x in (pair, untouched)
        )
        assert torch.equal(got, wanted)


def test_a_copy_of_a_cache_is_refused_like_it():
    model, given = made(PAIRED, "t5", 2), source("t5")
    pair = in_pair(CompressedCache(model, "none"))
    model(**given, decoder_input_ids=target(4), past_key_values=pair)
    twin = copy.deepcopy(pair)
    with pytest.raises(GeometryError, match="EncoderDecoderCache"):
        model(**given, decoder_input_ids=target(1), past_key_values=twin.self_attention_cache)
    steps = [
        model(**given, decoder_input_ids=target(1), past_key_values=x).logits for x in (pair, twin)
    ]
    assert torch.equal(*steps)


@both_depths
@pytest.mark.parametrize("name", ["t5", "bart"])
def test_a_mask_of_the_caller_hides_no_cross_attention(name, layers):
    """A ready mask, and nobody asks the cache for the sizes of one: as many queries as keys, too"""
    model, given = made(PAIRED, name, layers), source(name)
    ids, seen = target(20), torch.ones(1, 1, 20, 20, dtype=torch.bool).tril()
    cache = CompressedCache(model, "none")
    options = {**given, "decoder_input_ids": ids, "decoder_attention_mask": seen}
    with pytest.raises(GeometryError, match="EncoderDecoderCache"):
        model(**options, past_key_values=cache)
    assert lengths(cache, layers) == [0] * layers
    wanted = model(**options).logits
    pair = in_pair(cache)
    got = model(**options, past_key_values=pair).logits
    assert torch.allclose(got, wanted, atol=1e-4)
    more = {**options, "decoder_input_ids": ids[:, :1]}
    more["decoder_attention_mask"] = torch.ones(1, 1, 1, 21, dtype=torch.bool)
    assert model(**more, past_key_values=pair).logits.isfinite().all()
    assert lengths(cache, layers) == [21] * layers


def interrupted(model, name, call):
    """Make a call that Ctrl-C ends before the second layer of the decoder."""

    def stop(*args):
        raise KeyboardInterrupt

    decoder = model.get_decoder()
    hook = getattr(decoder, "block", None) or decoder.layers
    hook = hook[1].register_forward_pre_hook(stop)
    with pytest.raises(KeyboardInterrupt):
        call()
    hook.remove()


@pytest.mark.parametrize("held", [0, 5])
@every_model
def test_an_interrupted_call_is_reported_and_taken_back(name, held):
    """Of a single token nobody makes a mask: layers of unlike lengths would go unnoticed."""
    model, given = made(PAIRED, name, 2), source(name)
    ids = target(held + 1)
    cache = CompressedCache(model, "none")
    pair = in_pair(cache)
    if held:
        model(**given, decoder_input_ids=ids[:, :held], past_key_values=pair)

    def step():
        return model(**given, decoder_input_ids=ids[:, held:], past_key_values=pair).logits

    interrupted(model, name, step)
    assert lengths(cache, 2) == [held + 1, held]
    with pytest.raises(GeometryError, match="interrupted"):
        step()
    assert lengths(cache, 2) == [held] * 2
    wanted = model(**given, decoder_input_ids=ids).logits[:, held:]
    assert torch.allclose(step(), wanted, atol=1e-4)


def test_an_interrupted_call_beyond_a_window_asks_for_a_reset():
    model, given, ids = made(PAIRED, "t5gemma", 2), source("t5gemma"), target(13)
    cache = CompressedCache(model, "none")
    pair = in_pair(cache)
    model(**given, decoder_input_ids=ids[:, :12], past_key_values=pair)

    def step():
        return model(**given, decoder_input_ids=ids[:, 12:], past_key_values=pair).logits

    interrupted(model, "t5gemma", step)
    for _ in range(2):
        with pytest.raises(KVPactError, match="reset the cache"):
            step()
    pair.reset()
    wanted = model(**given, decoder_input_ids=ids).logits
    got = model(**given, decoder_input_ids=ids, past_key_values=pair).logits
    assert torch.allclose(got, wanted, atol=1e-4)


@both_depths
@pytest.mark.parametrize("name", DECODERS)
def test_a_decoder_by_itself_needs_a_pair_only_with_an_encoder(name, layers):
    model, ids = made(DECODERS, name, layers), target(12)
    encoded = {"encoder_hidden_states": torch.randn(2, 9, WIDTH)}

    def logits(cache, **given):
        parts = ids.split(5, dim=1)
        steps = [model(x, **given, past_key_values=cache, use_cache=True).logits for x in parts]
        return torch.cat(steps, 1)

    alone, single = CompressedCache(model, "none"), CompressedCache(model, "none")
    assert torch.allclose(logits(alone), model(ids, use_cache=False).logits, atol=1e-4)
    with pytest.raises(GeometryError, match="EncoderDecoderCache"):
        logits(single, **encoded)
    assert lengths(single, layers) == [0] * layers
    wanted = model(ids, **encoded, use_cache=False).logits
    assert torch.allclose(logits(in_pair(single), **encoded), wanted, atol=1e-4)


@both_depths
def test_gpt2_makes_a_pair_by_itself(layers):
    sizes = {"vocab_size": 64, "n_embd": WIDTH, "n_head": 2, "n_positions": 64}
    config = GPT2Config(**sizes, n_layer=layers, add_cross_attention=True)
    model, ids = made({"gpt2": lambda _: GPT2LMHeadModel(config)}, "gpt2", layers), target(12)
    given = {"encoder_hidden_states": torch.randn(2, 9, WIDTH)}
    cache = CompressedCache(model, "none")
    steps = [model(x, **given, past_key_values=cache).logits for x in ids.split(5, dim=1)]
    wanted = model(ids, **given, use_cache=False).logits
    assert torch.allclose(torch.cat(steps, 1), wanted, atol=1e-4)


def test_who_looks_for_a_pair_changes_nothing():
    model, given = made(PAIRED, "t5", 1), source("t5")
    cache = CompressedCache(model, "none")
    model(**given, decoder_input_ids=target(4), past_key_values=in_pair(cache))
    assert not hasattr(cache, "is_updated") and not hasattr(cache, "cross_attention_cache")
    assert not hasattr(cache, "max_cache_len")
    assert cache.get_seq_length() == 4


@both_depths
@pytest.mark.parametrize("name", ["t5", "bart"])
def test_a_paged_batch_is_refused_and_as_before(name, layers):
    model, given, ids = made(PAIRED, name, layers), source(name), target(6)
    count = len(CompressedCache(model, "none").layers)
    pool = PagedKVCache("none", CacheGeometry(count, 2, 16, 16, torch.float32), num_pages=64)
    batch = PagedBatch(model.config, pool)
    wanted, got = model(**given, decoder_input_ids=ids).logits, []
    for part in ids.split(2, dim=1):
        held = batch.get_seq_length()
        with pytest.raises(GeometryError, match="EncoderDecoderCache"):
            model(**given, decoder_input_ids=part, past_key_values=batch)
        assert lengths(batch, layers) == [held] * layers
        pair = in_pair(batch)
        got.append(model(**given, decoder_input_ids=part, past_key_values=pair).logits)
    assert torch.allclose(torch.cat(got, 1), wanted, atol=1e-4)
