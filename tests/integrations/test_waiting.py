"""The first tokens of a model's cache wait, exact, until one of them is to be packed."""

import copy
import sys
import weakref

import pytest
import torch
from tiny_configs import without_collector
from transformers import DynamicCache, Gemma2Config, LlamaConfig

from kvpact.errors import DeviceError, KVPactError, NonFiniteError
from kvpact.integrations.transformers import CompressedCache
from kvpact.integrations.transformers.versions import named

SPECS = (
    "trellis:bits=4", "turboquant:bits=4", "kivi:bits=2,window=40,sinks=3", "int:bits=8,window=9",
)  # fmt: skip


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
        logits = model(ids(tokens, seed=number), **named(cache), **options).logits
    return logits


@pytest.mark.parametrize("calls", ([1], [7, 1, 1], [60, 30], [90, 1, 1, 1, 1, 1]), ids=str)
def test_they_are_an_exact_cache_to_the_bit(llama, calls):
    cache, exact = compressed(llama, "trellis:bits=4"), DynamicCache(config=llama.config)
    assert torch.equal(*(run(llama, x, calls) for x in (cache, exact)))
    assert waiting(cache) == [True, True] and cache.get_seq_length() == sum(calls)
    for layer, other in zip(cache.layers, exact.layers, strict=True):
        assert torch.equal(layer.keys, other.keys) and torch.equal(layer.values, other.values)


@pytest.mark.parametrize("calls", ([3, *[1] * 130], [40, 41, 42, 43], [97], [300, 1]), ids=str)
@pytest.mark.parametrize("spec", SPECS)
def test_then_the_cache_holds_what_it_would_without_waiting(llama, spec, calls):
    now, later = compressed(llama, spec, waits=False), compressed(llama, spec)
    run(llama, now, calls)
    run(llama, later, calls)
    assert waiting(later) == [False, False]
    for layer in range(2):
        one, other = now.held().entry(layer), later.held().entry(layer)
        assert [x.packed for x in one.streams()] == [x.packed for x in other.streams()]
        for side in "kv":
            torch.testing.assert_close(one.dequantize(side), other.dequantize(side))


def test_how_many_wait(llama):
    cache = compressed(llama, "trellis:bits=4")
    for tokens, wait in ((94, True), (1, True), (1, False)):
        run(llama, cache, [tokens])
        assert waiting(cache) == [wait, wait]
    assert cache.get_seq_length() == 96


def test_padding_is_known_when_they_are_stored(llama, prompt):
    caches = [compressed(llama, "trellis:bits=4", waits) for waits in (True, False)]
    with torch.no_grad():
        logits = [llama(**prompt, **named(cache)).logits[1] for cache in caches]
    torch.testing.assert_close(*logits)
    assert waiting(caches[0]) == [False, False]
    for cache in caches:
        assert cache.held().entry(1).padding.tolist() == [7, 0]


@pytest.mark.parametrize("change", ["reorder", "repeat", "copy", "reset"])
def test_whatever_changes_a_cache_stores_them_first(llama, change):
    caches = [compressed(llama, "trellis:bits=4", waits) for waits in (True, False)]
    for index, cache in enumerate(caches):
        run(llama, cache, [20, 1, 1])
        if change == "reorder":
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
        assert torch.equal(x, given) and x.untyped_storage().nbytes() == x.nbytes
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
    assert cache.get_seq_length() == sum(calls)  # as if nobody had called
    exact = DynamicCache(config=llama.config)
    run(llama, exact, calls) if calls else None
    torch.testing.assert_close(run(llama, cache, [1]), run(llama, exact, [1]))


@pytest.mark.parametrize("factors", [(2e4, torch.nan, 1.0), (1.0, torch.nan, 6e4)])
def test_no_layer_keeps_a_token_of_a_call_that_is_refused(make_model, sizes, factors):
    """Nor one that was stored, for it might have been too large, before another was refused."""
    config = LlamaConfig(**sizes | {"num_hidden_layers": 3})
    specs = {"default": "trellis:bits=4", "layers": {"2": "int:bits=8,window=0"}}
    cache = CompressedCache(make_model(config), specs)
    k = torch.randn(1, 2, 9, 16, generator=torch.Generator().manual_seed(0))
    for layer in range(3):
        cache.update(k, k, layer)
    new = torch.ones(1, 2, 1, 16)
    with pytest.raises(NonFiniteError):
        for layer, factor in enumerate(factors):
            cache.update(new * factor, new, layer)
    assert [layer.get_seq_length() for layer in cache.layers] == [9, 9, 9]
    assert torch.equal(cache.layers[0].keys, k) and torch.equal(cache.layers[1].values, k)


@pytest.mark.parametrize(("calls", "removed"), [([20, 1, 1], 5), ([9], 1), ([9], 9), ([9], 30)])
def test_crop_cuts_what_waits(llama, calls, removed):
    cache, exact = compressed(llama, "trellis:bits=4"), DynamicCache(config=llama.config)
    for each in (cache, exact):
        run(llama, each, calls)
        each.crop(-min(removed, sum(calls)) if each is exact else -removed)
    left = max(sum(calls) - removed, 0)
    assert waiting(cache) == [left > 0] * 2 and cache.get_seq_length() == left
    assert torch.equal(run(llama, cache, [3]), run(llama, exact, [3]))
    assert waiting(cache) == [True, True]


def test_numbers_that_crop_removes_need_not_be_storable(llama):
    cache = compressed(llama, "trellis:bits=4")
    run(llama, cache, [9])
    k = torch.full((1, 2, 1, 16), 1e30)
    cache.layers[0].update(k, k)
    cache.crop(-1)
    assert [layer.get_seq_length() for layer in cache.layers] == [9, 9]
    cache.stats()


def test_a_dropped_cache_frees_them_without_the_garbage_collector(llama):
    cache = compressed(llama, "trellis:bits=4")
    run(llama, cache, [9, 1])
    tokens = weakref.ref(cache._shared.waiting[0])
    with without_collector():
        del cache
        assert tokens() is None


def test_double_precision_is_stored_at_once(llama, fallbacks):
    model = copy.deepcopy(llama).double()
    cache = compressed(model, "trellis:bits=4")
    _, said = fallbacks(lambda: run(model, cache, [9, 1]))
    assert len(said) == 1 and "float64" in said[0]
    assert waiting(cache) == [False, False] and cache.layers[0].keys.dtype is torch.float32


def test_the_meta_device_is_refused_by_name(llama):
    cache = CompressedCache(llama, "trellis:bits=4")
    k = torch.ones(1, 2, 9, 16, device="meta")
    with pytest.raises(DeviceError, match="meta"):
        cache.update(k, k, 0)
        cache.stats()


def test_an_interrupt_finds_k_and_v_of_equally_many_tokens(llama):
    """Signals are delivered between lines of Python: at each of them both are alike."""
    cache = compressed(llama, "trellis:bits=4")
    run(llama, cache, [9])
    tokens, seen = cache._shared.waiting[0], set()

    def look(frame, event, arg):
        seen.add((tokens.k.shape[2], tokens.v.shape[2], tokens.total))
        return look

    k = torch.ones(1, 2, 2, 16)
    sys.settrace(look)
    try:
        cache.layers[0].update(k, k)
    finally:
        sys.settrace(None)
    assert seen == {(9, 9, 9), (11, 11, 11)}


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


def test_attention_with_a_softcap_does_not_wait(make_model, sizes):
    config = Gemma2Config(**sizes, head_dim=16, layer_types=["full_attention"] * 2)
    model = make_model(config, "eager")
    model.set_attn_implementation("kvpact")
    cache = compressed(model, "trellis:bits=4")
    got = run(model, cache, [9, 1])
    assert waiting(cache) == [False, False] and not cache._shared.may_wait
    model.set_attn_implementation("eager")
    torch.testing.assert_close(got, run(model, DynamicCache(config=config), [9, 1]))


def test_layers_of_a_recipe_wait_each_for_themselves(llama):
    recipe = {"default": "trellis:bits=4", "layers": {"1": "int:bits=8,window=0"}}
    cache = CompressedCache(llama, recipe)
    wanted = run(llama, DynamicCache(config=llama.config), [9, 1])
    torch.testing.assert_close(run(llama, cache, [9, 1]), wanted, rtol=0.02, atol=0.05)
    assert waiting(cache) == [True, False]
