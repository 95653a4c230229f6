"""The first tokens of a model's cache wait, exact, until one of them is to be packed."""

import copy

import pytest
import torch
from transformers import DynamicCache, Gemma2Config, LlamaConfig

from kvpact.errors import KVPactError, NonFiniteError
from kvpact.integrations.transformers import CompressedCache

SPECS = (
    "trellis:bits=4",
    "turboquant:bits=4",
    "kivi:bits=2,window=40,sinks=3",
    "int:bits=8,window=9",
)


def ids(tokens, rows=1, seed=0):
    return torch.randint(3, 128, (rows, tokens), generator=torch.Generator().manual_seed(seed))


def compressed(model, spec, waits=True):
    cache = CompressedCache(model, spec)
    cache._shared.may_wait = waits
    return cache


def waiting(cache):
    return [tokens is not None for tokens in cache._shared.waiting]


@torch.no_grad()
def run(model, cache, calls, **options):
    """Give tokens in calls of so many; return the logits of the last call."""
    for number, tokens in enumerate(calls):
        logits = model(ids(tokens, seed=number), past_key_values=cache, **options).logits
    return logits


@pytest.mark.parametrize("calls", ([1], [7, 1, 1], [60, 30], [90, 1, 1, 1, 1, 1]), ids=str)
def test_they_are_an_exact_cache_to_the_bit(llama, calls):
    model = llama
    wanted = run(model, DynamicCache(config=model.config), calls)
    cache = compressed(model, "trellis:bits=4")
    got = run(model, cache, calls)
    assert torch.equal(got, wanted)
    assert waiting(cache) == [True, True] and cache.get_seq_length() == sum(calls)
    exact = DynamicCache(config=model.config)
    run(model, exact, calls)
    for layer, other in zip(cache.layers, exact.layers, strict=True):
        assert torch.equal(layer.keys, other.keys) and torch.equal(layer.values, other.values)


@pytest.mark.parametrize("calls", ([3, *[1] * 130], [40, 41, 42, 43], [97], [300, 1]), ids=str)
@pytest.mark.parametrize("spec", SPECS)
def test_then_the_cache_holds_what_it_would_without_waiting(llama, spec, calls):
    now, later = compressed(llama, spec, waits=False), compressed(llama, spec)
    run(llama, now, calls)
    run(llama, later, calls)
    assert waiting(later) == [False, False]
    for one, other in zip(now.layers, later.layers, strict=True):
        one, other = one.entry(), other.entry()
        assert [x.packed for x in one.streams()] == [x.packed for x in other.streams()]
        for side in "kv":
            torch.testing.assert_close(one.dequantize(side), other.dequantize(side))


def test_how_many_wait(llama):
    cache = compressed(llama, "trellis:bits=4")
    run(llama, cache, [94])
    assert waiting(cache) == [True, True]
    run(llama, cache, [1])
    assert waiting(cache) == [True, True]
    run(llama, cache, [1])
    assert waiting(cache) == [False, False] and cache.get_seq_length() == 96


def test_padding_is_known_when_they_are_stored(llama, prompt):
    caches = [compressed(llama, "trellis:bits=4", waits) for waits in (True, False)]
    with torch.no_grad():
        logits = [llama(**prompt, past_key_values=cache).logits[1] for cache in caches]
    torch.testing.assert_close(*logits)
    assert waiting(caches[0]) == [False, False]
    for cache in caches:
        assert cache.layers[1].entry().padding.tolist() == [7, 0]


@pytest.mark.parametrize("change", ["crop", "reorder", "repeat", "copy", "reset"])
def test_whatever_changes_a_cache_stores_them_first(llama, change):
    caches = [compressed(llama, "trellis:bits=4", waits) for waits in (True, False)]
    for index, cache in enumerate(caches):
        run(llama, cache, [20, 1, 1])
        if change == "crop":
            cache.crop(-5)
        elif change == "reorder":
            cache.reorder_cache(torch.tensor([0]))
        elif change == "repeat":
            cache.batch_repeat_interleave(1)
        elif change == "copy":
            caches[index] = copy.deepcopy(cache)
        else:
            cache.reset()
        assert waiting(caches[index]) == [False, False]
    first, second = (run(llama, cache, [3]) for cache in caches)
    torch.testing.assert_close(first, second)
    assert caches[0].get_seq_length() == caches[1].get_seq_length()
    assert waiting(caches[0]) == [change == "reset"] * 2


def test_no_memory_of_others_is_kept(llama):
    """A prompt's K may be a view of something larger."""
    cache = compressed(llama, "trellis:bits=4")
    large = torch.randn(1, 2, 900, 16, generator=torch.Generator().manual_seed(0))
    k, v = cache.update(large[:, :, 5:25], large[:, :, 30:50], 0)
    for x, given in ((k, large[:, :, 5:25]), (v, large[:, :, 30:50])):
        assert torch.equal(x, given)
        assert x.untyped_storage().nbytes() == x.nbytes
    large.zero_()
    assert k.abs().min() > 0


@pytest.mark.parametrize("number", [torch.nan, torch.inf])
@pytest.mark.parametrize("calls", [[], [9]], ids=str)
def test_no_numbers_are_refused_by_the_call_that_brings_them(llama, number, calls):
    cache = compressed(llama, "trellis:bits=4")
    run(llama, cache, calls) if calls else None
    weight = llama.model.layers[0].self_attn.v_proj.weight
    kept = weight.detach().clone()
    with torch.no_grad():
        weight[0, 0] = number
    with pytest.raises(NonFiniteError):
        run(llama, cache, [1])
    with torch.no_grad():
        weight.copy_(kept)


def test_numbers_too_large_stay_readable_and_are_refused_when_stored(llama):
    cache = compressed(llama, "trellis:bits=4")
    k = torch.ones(1, 2, 20, 16)
    k[0, 0, 3, 0] = 1e30
    for turn in range(2):
        if not turn:
            cache.update(k, torch.ones(1, 2, 20, 16), 0)
        with pytest.raises(NonFiniteError):
            cache.stats()
        assert cache.get_seq_length() == 20  # nothing is lost
    cache.reset()
    assert cache.get_seq_length() == 0


@pytest.mark.parametrize("shape", [(2, 2, 1, 16), (1, 3, 1, 16), (1, 2, 1, 8)], ids=str)
def test_tokens_that_do_not_fit_those_that_wait(llama, shape):
    cache = compressed(llama, "trellis:bits=4")
    run(llama, cache, [9])
    k = torch.ones(shape)
    with pytest.raises(KVPactError):
        cache.update(k, k, 0)
        cache.stats()
    assert cache.layers[0].get_seq_length() == 9


def test_training_is_refused_at_once(llama):
    cache = compressed(llama, "trellis:bits=4")
    llama.train()
    with pytest.raises(KVPactError, match="eval"):
        run(llama, cache, [5])


def test_gradients_are_refused_at_once(llama):
    logits = llama(ids(5), past_key_values=compressed(llama, "trellis:bits=4")).logits
    with pytest.raises(KVPactError, match="gradients"):
        logits.sum().backward()


def test_attention_with_a_softcap_does_not_wait(make_model, sizes):
    config = Gemma2Config(**sizes, head_dim=16, layer_types=["full_attention"] * 2)
    model = make_model(config, "eager")
    model.set_attn_implementation("kvpact")
    cache = compressed(model, "trellis:bits=4")
    got = run(model, cache, [9, 1])
    assert waiting(cache) == [False, False] and not cache._shared.may_wait
    model.set_attn_implementation("eager")
    torch.testing.assert_close(got, run(model, DynamicCache(config=config), [9, 1]))


def test_layers_of_a_recipe_wait_each_for_themselves(make_model, sizes):
    model = make_model(LlamaConfig(**sizes))
    cache = CompressedCache(
        model, {"default": "trellis:bits=4", "layers": {"1": "int:bits=8,window=0"}}
    )
    wanted = run(model, DynamicCache(config=model.config), [9, 1])
    torch.testing.assert_close(run(model, cache, [9, 1]), wanted, rtol=0.02, atol=0.05)
    assert waiting(cache) == [True, False]
