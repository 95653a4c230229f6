"""Models with cross-attention: exact in a pair of caches; a single one is refused, and kept."""

import copy

import pytest
import torch
from cross_attention_models import DECODERS, PAIRED, WIDTH, in_pair, lengths, made, source, target
from tiny_configs import interrupted
from transformers import GPT2Config, GPT2LMHeadModel

from kvpact import CacheGeometry, PagedKVCache
from kvpact.errors import GeometryError, KVPactError, NonFiniteError
from kvpact.integrations.transformers import CompressedCache, PagedBatch, enable
from kvpact.integrations.transformers.versions import CACHE, KEEPS_LATENTS, named

pytestmark = pytest.mark.usefixtures("no_grad")
# mT5 has T5's attention, Marian and Whisper have BART's.
every_code = pytest.mark.parametrize("name", ["t5", "t5gemma", "bart"])


@pytest.mark.parametrize(
    ("name", "layers"), [*((name, 2) for name in PAIRED), ("t5", 1), ("bart", 1)]
)
def test_a_pair_and_enable_give_the_exact_tokens(name, layers, greedy):
    model, given = made(PAIRED, name, layers), source(name)
    greedy = {**greedy, "max_new_tokens": 12}
    wanted = model.generate(**given, **greedy)
    if not torch.equal(wanted, model.generate(**given, **greedy, use_cache=False)):
        pytest.skip("this transformers lets cross-attention see a window alone")
    pair = in_pair(CompressedCache(model, "none"))
    assert torch.equal(model.generate(**given, **greedy, **named(pair)), wanted)
    with enable(model, "none"):
        assert torch.equal(model.generate(**given, **greedy), wanted)


def asked(model, given, ids, cache):
    """Call a model with a single cache; skip the test where it ends in the model's own code."""
    try:
        model(**given, decoder_input_ids=ids, **named(cache))
    except UnboundLocalError:
        pytest.skip("this model wants a pair and does not say so")


@pytest.mark.parametrize(
    ("name", "attention"), [*((name, "auto") for name in PAIRED), ("t5", "keep"), ("bart", "keep")]
)
def test_a_single_cache_is_refused_and_as_before(name, attention, greedy):
    """T5 asks for a layer's length before each attention: no sign of a new call."""
    model, given = made(PAIRED, name, 2), source(name)
    ids = target(4)
    cache = CompressedCache(model, "none", attention=attention)
    for _ in range(2):
        # What it says is what `in_pair` makes, which all tests show to be exact.
        with pytest.raises(GeometryError, match="enable") as told:
            asked(model, given, ids, cache)
        pair = "EncoderDecoderCache(CompressedCache(model, spec), DynamicCache())"
        assert f"{CACHE}={pair}, or none after" in str(told.value)
        # T5Gemma's own `generate` refuses it before kvpact does.
        with pytest.raises(ValueError, match="EncoderDecoderCache"):
            model.generate(**given, **greedy, **named(cache))
        assert lengths(cache, 2) == [0] * 2
    wanted = model(**given, decoder_input_ids=ids).logits
    pair = in_pair(cache)
    steps = [{**given, "decoder_input_ids": part} for part in ids.split(2, dim=1)]
    parts = [model(**step, **named(pair)).logits for step in steps]
    assert torch.allclose(torch.cat(parts, 1), wanted, atol=1e-4)


@pytest.mark.parametrize("spec", ["int:bits=4,sinks=4,window=8", "kivi:bits=2,window=16"])
@every_code
def test_a_filled_cache_is_as_before_a_refusal(name, spec):
    """Exactly, although the refused tokens had pushed others out of the window."""
    model, given, ids = made(PAIRED, name, 2), source(name), target(60)

    pair = in_pair(CompressedCache(model, spec))
    model(**given, decoder_input_ids=ids[:, :50], **named(pair))
    untouched, cache = copy.deepcopy(pair), pair.self_attention_cache
    assert not hasattr(cache, "is_updated")
    for part in (ids[:, 50:51], ids[:, 50:]):
        with pytest.raises(GeometryError, match="EncoderDecoderCache"):
            model(**given, decoder_input_ids=part, **named(cache))
        assert lengths(cache, 2) == [50] * 2
    for part in (ids[:, 50:51], ids[:, 51:]):
        step = {**given, "decoder_input_ids": part}
        assert torch.equal(*(model(**step, **named(x)).logits for x in (pair, untouched)))


def second_layer(model):
    """Return the second layer of the decoder."""
    decoder = model.get_decoder()
    return (getattr(decoder, "block", None) or decoder.layers)[1]


def test_an_update_that_failed_is_no_update():
    model, given, ids = made(PAIRED, "bart", 2), source("bart"), target(40)
    pair = in_pair(CompressedCache(model, "int:bits=4,sinks=4,window=8"))
    model(**given, decoder_input_ids=ids[:, :30], **named(pair))

    def step():
        return model(**given, decoder_input_ids=ids[:, 30:], **named(pair)).logits

    first = model.get_decoder().layers[0].self_attn.k_proj
    hook = first.register_forward_hook(lambda *args: args[2] * torch.nan)
    for _ in range(2):
        with pytest.raises(NonFiniteError):
            step()
    hook.remove()
    assert lengths(pair, 2) == [30] * 2
    assert step().isfinite().all()


@pytest.mark.parametrize("held", [0, 5])
@pytest.mark.parametrize("told", [False, True])
@every_code
def test_a_call_interrupted_in_its_first_layer_is_taken_back(name, told, held):
    """Of a first call that is reported, where nobody knows how many layers the model has."""
    if not KEEPS_LATENTS:
        pytest.skip("decoders of this transformers make masks without asking the cache")
    model, given = made(PAIRED, name, 2), source(name)
    ids = target(held + 1)
    cache = CompressedCache(model if told else model.config, "none")
    pair = in_pair(cache)
    if held:
        model(**given, decoder_input_ids=ids[:, :held], **named(pair))

    def step():
        return model(**given, decoder_input_ids=ids[:, held:], **named(pair)).logits

    with interrupted(second_layer(model)):
        step()
    assert [layer.get_seq_length() for layer in cache.layers] == [held + 1, held]
    if not held and not told:
        with pytest.raises(GeometryError, match="interrupted"):
            step()
    assert lengths(cache, 2) == [held] * 2
    wanted = model(**given, decoder_input_ids=ids).logits[:, held:]
    assert torch.allclose(step(), wanted, atol=1e-4)


def test_an_interrupted_call_beyond_a_window_asks_for_a_reset():
    model, given, ids = made(PAIRED, "t5gemma", 2), source("t5gemma"), target(13)
    cache = CompressedCache(model, "none")
    pair = in_pair(cache)
    model(**given, decoder_input_ids=ids[:, :12], **named(pair))

    def step():
        return model(**given, decoder_input_ids=ids[:, 12:], **named(pair)).logits

    with interrupted(second_layer(model)):
        step()
    for _ in range(2):
        with pytest.raises(KVPactError, match="reset the cache"):
            step()
    cache.reset()
    pair = in_pair(cache)
    wanted = model(**given, decoder_input_ids=ids).logits
    got = model(**given, decoder_input_ids=ids, **named(pair)).logits
    assert torch.allclose(got, wanted, atol=1e-4)


@pytest.mark.parametrize("name", DECODERS)
def test_a_decoder_by_itself_needs_a_pair_only_with_an_encoder(name):
    model, ids = made(DECODERS, name, 2), target(12)
    encoded = {"encoder_hidden_states": torch.randn(2, 9, WIDTH)}

    def logits(cache, **given):
        parts = ids.split(5, dim=1)
        steps = [model(x, **given, **named(cache), use_cache=True).logits for x in parts]
        return torch.cat(steps, 1)

    alone, single = CompressedCache(model, "none"), CompressedCache(model, "none")
    assert torch.allclose(logits(alone), model(ids, use_cache=False).logits, atol=1e-4)
    with pytest.raises(GeometryError, match="EncoderDecoderCache"):
        logits(single, **encoded)
    assert lengths(single, 2) == [0] * 2
    wanted = model(ids, **encoded, use_cache=False).logits
    assert torch.allclose(logits(in_pair(single), **encoded), wanted, atol=1e-4)
    # One that held tokens without an encoder is looked at, too, and is as before.
    with pytest.raises(GeometryError, match="EncoderDecoderCache"):
        logits(alone, **encoded)
    assert lengths(alone, 2) == [12] * 2
    more, both = target(15)[:, 12:], torch.cat([ids, target(15)[:, 12:]], 1)
    got = model(more, **named(alone), use_cache=True).logits
    assert torch.allclose(got, model(both, use_cache=False).logits[:, 12:], atol=1e-4)


@pytest.mark.parametrize("layers", [1, 2])
def test_gpt2_makes_a_pair_by_itself(layers):
    sizes = {"vocab_size": 64, "n_embd": WIDTH, "n_head": 2, "n_positions": 64}
    config = GPT2Config(**sizes, n_layer=layers, add_cross_attention=True)
    model, ids = made({"gpt2": lambda _: GPT2LMHeadModel(config)}, "gpt2", layers), target(12)
    given = {"encoder_hidden_states": torch.randn(2, 9, WIDTH)}
    cache = CompressedCache(model, "none")
    steps = [model(x, **given, **named(cache)).logits for x in ids.split(5, dim=1)]
    wanted = model(ids, **given, use_cache=False).logits
    assert torch.allclose(torch.cat(steps, 1), wanted, atol=1e-4)


@pytest.mark.parametrize("name", ["t5", "bart"])
def test_a_paged_batch_is_refused_and_as_before(name):
    model, given, ids = made(PAIRED, name, 2), source(name), target(6)
    count = len(CompressedCache(model, "none").layers)
    pool = PagedKVCache("none", CacheGeometry(count, 2, 16, 16, torch.float32), num_pages=64)
    batch = PagedBatch(model.config, pool)
    wanted, got = model(**given, decoder_input_ids=ids).logits, []
    for part in ids.split(2, dim=1):
        held = batch.get_seq_length()
        with pytest.raises(GeometryError, match="EncoderDecoderCache"):
            model(**given, decoder_input_ids=part, **named(batch))
        assert lengths(batch, 2) == [held] * 2
        pair = in_pair(batch)
        got.append(model(**given, decoder_input_ids=part, **named(pair)).logits)
    assert torch.allclose(torch.cat(got, 1), wanted, atol=1e-4)
