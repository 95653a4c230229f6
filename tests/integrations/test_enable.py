"""`enable`: what `generate` computes with no cache named is what it computes with ours passed."""

import copy
import gc
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import transformers
from cross_attention_models import PAIRED, in_pair, made, source
from families import skip_without_chunks
from tiny_configs import gemma3, without_collector
from tokenizers import Tokenizer, models, pre_tokenizers

from kvpact import KeyOffset
from kvpact.errors import EnableError, KVPactError
from kvpact.integrations.transformers import CompressedCache, disable, enable
from kvpact.integrations.transformers.enabled.enable import PREPARE
from kvpact.integrations.transformers.versions import cache_of, named

COARSE = "int:bits=2,sinks=0,window=0"
"""So coarse that its greedy tokens differ from the exact ones: equal ones tell which cache ran."""


def tokens(model, options, **inputs):
    """Generate with a fixed seed."""
    torch.manual_seed(5)
    try:
        return model.generate(**inputs, **options)
    except ValueError as error:
        skip_without_chunks(error)
        raise


@pytest.mark.parametrize("wrap", {
    "pipeline": lambda model: type("Pipe", (), {"model": model})(),
    "PEFT": lambda model: type("Peft", (), {"get_base_model": lambda self: model})(),
    "compiled": torch.compile,
}.values())  # fmt: skip
def test_what_wraps_a_model_is_enabled_and_disabled_by_it(llama, prompt, greedy, wrap):
    exact, wrapper = llama.generate(**prompt, **greedy), wrap(llama)
    wanted = llama.generate(**prompt, **greedy, **named(CompressedCache(llama, COARSE)))
    assert enable(wrapper, COARSE).model is llama and PREPARE in vars(llama)
    assert torch.equal(llama.generate(**prompt, **greedy), wanted)
    disable(wrapper)
    assert PREPARE not in vars(llama) and torch.equal(llama.generate(**prompt, **greedy), exact)


def test_a_dynamic_cache_is_what_is_replaced(llama, prompt, greedy):
    llama.generation_config.cache_implementation = "dynamic"
    with enable(llama, COARSE):
        options = {"cache_implementation": "dynamic", "return_dict_in_generate": True}
        out = llama.generate(**prompt, **greedy, **options)
    assert isinstance(cache_of(out), CompressedCache) and cache_of(out).spec == COARSE


@pytest.mark.parametrize("extra", [
    {}, {"do_sample": True, "temperature": 1.5}, {"num_beams": 3}, {"prefill_chunk_size": 6},
], ids=["greedy", "sampling", "beams", "chunked-prefill"])  # fmt: skip
def test_a_padded_batch_has_the_tokens_of_a_cache_that_is_passed(llama, prompt, greedy, extra):
    options = {**greedy, **extra}
    exact = tokens(llama, options, **prompt)
    wanted = tokens(llama, {**options, **named(CompressedCache(llama, COARSE))}, **prompt)
    assert not torch.equal(wanted, exact)
    enable(llama, COARSE)
    for _ in range(2):  # every call has a cache of its own
        assert torch.equal(tokens(llama, options, **prompt), wanted)
    disable(llama)
    assert torch.equal(tokens(llama, options, **prompt), exact)


def test_prompt_lookup_and_drafts(llama, make_model, prompt, greedy):
    """With exact specs, whatever a draft proposes, the tokens are the target's own."""
    row = {name: x[1:] for name, x in prompt.items()}
    alone = tokens(llama, greedy, **row)
    draft = make_model(llama.config, seed=1)
    enable(llama, "none")
    enable(draft, COARSE)
    assert torch.equal(tokens(llama, {**greedy, "assistant_model": draft}, **row), alone)
    lookup = {"eos_token_id": 127, "prompt_lookup_num_tokens": 3}
    assert torch.equal(tokens(llama, {**greedy, **lookup}, **row), alone)


@pytest.mark.parametrize("layer", ["1", "-1"])
def test_drafts_of_the_first_layers_have_the_specs_of_those(llama, prompt, greedy, layer):
    """`assistant_early_exit`: the model drafts for itself, with fewer layers than it has."""
    given = {"input_ids": prompt["input_ids"][1:], **greedy}
    wanted, offset = llama.generate(**given), KeyOffset.from_bias(torch.ones(2, 16), torch.ones(8))
    with enable(llama, {"default": "none", "layers": {layer: "none"}}, key_offsets={1: offset}):
        try:
            assert torch.equal(llama.generate(**given, assistant_early_exit=1), wanted)
        except TypeError:  # of transformers 5.0's own
            pytest.skip("this transformers drafts nothing by layers of its own")
        cache = CompressedCache(llama, "none")
        got = llama.generate(**given, assistant_early_exit=1, **named(cache))
        assert torch.equal(got, wanted) and cache.get_seq_length()


def test_the_cache_comes_back_with_the_result(llama, prompt, greedy):
    with enable(llama, COARSE):
        result = llama.generate(**prompt, **greedy, return_dict_in_generate=True)
    cache = cache_of(result)
    assert isinstance(cache, CompressedCache)
    assert cache.get_seq_length() == 40 + greedy["max_new_tokens"] - 1
    assert cache.stats()["spec"] == COARSE


def test_a_cache_of_the_caller_wins(llama, prompt, greedy):
    mine, theirs = CompressedCache(llama, "none"), transformers.DynamicCache(config=llama.config)
    exact = tokens(llama, greedy, **prompt)
    with enable(llama, COARSE):
        for cache in (mine, theirs):
            assert torch.equal(tokens(llama, {**greedy, **named(cache)}, **prompt), exact)
            assert cache.get_seq_length() == 51
        assert torch.equal(tokens(llama, {**greedy, "use_cache": False}, **prompt), exact)


def test_layers_with_windows_keep_their_own_cache(make_model, sizes, prompt, greedy):
    model = make_model(gemma3(sizes, "sliding", "full", "sliding"))
    wanted = tokens(model, {**greedy, **named(CompressedCache(model, COARSE))}, **prompt)
    with enable(model, COARSE):
        result = tokens(model, {**greedy, "return_dict_in_generate": True}, **prompt)
    assert torch.equal(result.sequences, wanted)
    assert cache_of(result).stats()["layers"] == {"compressed": 1, "native": 2}


def test_encoder_decoder_models_have_a_pair_of_caches(greedy):
    model, given = made(PAIRED, "t5", 2), source("t5")
    wanted = model.generate(**given, **greedy, **named(in_pair(CompressedCache(model))))
    with enable(model):
        result = model.generate(**given, **greedy, return_dict_in_generate=True)
        with pytest.raises(KVPactError, match="rolls back transformers' own"):
            model.generate(given["input_ids"][:1], **greedy, prompt_lookup_num_tokens=3)
    assert torch.equal(result.sequences, wanted)
    assert isinstance(cache_of(result), transformers.EncoderDecoderCache)
    assert isinstance(cache_of(result).self_attention_cache, CompressedCache)


def test_pipelines_use_it(llama):
    words = {"pad": 0, "start": 1, "end": 2} | {f"w{i}": i for i in range(3, 128)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w3"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="pad")
    text = " ".join(f"w{3 + 7 * i % 120}" for i in range(40))
    options = {"max_new_tokens": 24, "do_sample": False, "return_full_text": False}
    generator = transformers.pipeline("text-generation", model=llama, tokenizer=tokenizer)
    exact = generator([text, text[:40]], batch_size=2, **options)
    ids = tokenizer(text, return_tensors="pt").input_ids
    cache = CompressedCache(llama, COARSE)
    after = llama.generate(ids, max_new_tokens=24, do_sample=False, **named(cache))[0, 40:]
    with enable(llama, COARSE):
        (got,) = generator(text, **options)
        assert got["generated_text"].strip() == tokenizer.decode(after, skip_special_tokens=True)
        assert got["generated_text"] != exact[0][0]["generated_text"]
    assert generator([text, text[:40]], batch_size=2, **options) == exact


def test_threads_have_caches_of_their_own(llama, prompt, greedy):
    """Caches come and go in all threads, and each one's attention is over its own slots."""
    row = {name: x[1:] for name, x in prompt.items()}
    exact = llama.generate(**row, **greedy)
    enable(llama, COARSE)
    wanted = llama.generate(**row, **greedy)
    assert not torch.equal(exact, wanted)

    def work(_):
        return [torch.equal(llama.generate(**row, **greedy), wanted) for _ in range(4)]

    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(work, range(4)))
    disable(llama)
    gc.collect()
    assert found == [[True] * 4] * 4
    assert llama.config._attn_implementation == "sdpa"
    assert torch.equal(llama.generate(**row, **greedy), exact)


def test_a_recipe_is_read_once(llama, prompt, greedy, tmp_path):
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(f'default = "none"\n[layers]\n1 = "{COARSE}"\n')
    enable(llama, recipe)
    recipe.unlink()
    got = cache_of(llama.generate(**prompt, **greedy, return_dict_in_generate=True))
    assert [str(layer.spec) for layer in got.layers] == ["none", COARSE]


def test_a_model_is_freed_with_its_last_user(make_model, llama):
    model = make_model(llama.config)
    enable(model, COARSE)
    gone = weakref.ref(model)
    with without_collector():
        del model
        assert gone() is None


def test_a_shallow_copy_outlives_its_original(make_model, sizes, prompt, greedy):
    model = make_model(transformers.LlamaConfig(**sizes))
    plain = tokens(model, greedy, **prompt)
    enable(model, "none")
    other = copy.copy(model)
    assert torch.equal(tokens(other, greedy, **prompt), plain)
    disable(other)
    assert PREPARE in vars(model) and PREPARE not in vars(other)
    other, gone = copy.copy(model), weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None
    with pytest.raises(EnableError, match=r"is gone.*enable the copy, or disable it"):
        tokens(other, greedy, **prompt)
    enable(other, "none")
    assert torch.equal(tokens(other, greedy, **prompt), plain)
    disable(other)
    assert torch.equal(tokens(other, greedy, **prompt), plain)
