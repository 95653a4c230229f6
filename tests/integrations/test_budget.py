"""`CompressedCache(…, budget=)`: a model's cache that holds no more than it was given."""

import contextlib
import copy

import pytest
import torch
from tests.helpers.tiny_llama import tiny_llama
from tiny_configs import SIZES, gemma3
from transformers import DynamicCache

import kvpact
from kvpact.errors import BudgetExceeded, SpecError
from kvpact.integrations.transformers import CompressedCache, prefix_cache
from kvpact.integrations.transformers.versions import cache_of, named
from kvpact.stores import MemoryStore

pytestmark = pytest.mark.usefixtures("no_grad")

IDS = torch.randint(3, 128, (1, 900), generator=torch.Generator().manual_seed(5))
BYTES = 360_000


@pytest.fixture(scope="module")
def model():
    return tiny_llama(1024)


def run(model, cache, ids, size=64):
    found = []
    for part in ids.split(size, dim=1):
        found.append(model(input_ids=part, **named(cache), use_cache=True).logits)
        if isinstance(cache, CompressedCache):
            assert cache.memory_usage() <= BYTES
    return torch.cat(found, 1)


def test_a_model_stays_within_its_budget_and_is_exact_while_all_fits(model):
    cache = CompressedCache(model, budget=BYTES)
    wanted, found = (run(model, x, IDS) for x in (DynamicCache(config=model.config), cache))
    first = cache.stats()["budget"]
    exact = cache._shared.caches()[0]._schedule.lengths()[0]
    torch.testing.assert_close(found[:, :exact], wanted[:, :exact], atol=1e-4, rtol=1e-4)
    divergence = torch.nn.functional.kl_div(
        found.log_softmax(-1), wanted.log_softmax(-1), log_target=True, reduction="none"
    ).sum(-1)
    assert 1e-6 < divergence[:, exact:].mean() < 0.5
    assert 2 < first["bits"] < 4.5 and first["bytes"] == BYTES
    copied = copy.deepcopy(cache)
    cache.crop(-300)
    assert cache.get_seq_length() == 600 and cache.stats()["budget"]["specs"] == first["specs"]
    again = run(model, copied, IDS[:, :5], 1)
    assert again.isfinite().all()
    other = CompressedCache(model, budget=BYTES)
    run(model, other, IDS[:, :70])
    other.restore(copied.snapshot())
    assert torch.equal(run(model, other, IDS[:, 5:9], 1), run(model, copied, IDS[:, 5:9], 1))


def test_a_budget_begins_exact_unless_a_spec_is_named(model):
    for given, first in (((), "none"), (("trellis:bits=4",), "trellis:bits=4")):
        cache = CompressedCache(model, *given, budget=BYTES)
        assert {str(spec) for spec in cache._shared.specs} == {first}
        with kvpact.enable(model, *given, budget=BYTES):
            out = model.generate(IDS[:, :9], max_new_tokens=2, return_dict_in_generate=True)
        assert cache_of(out).spec == first


def test_windows_of_other_layers_are_set_aside(make_model):
    model = make_model(gemma3(dict(SIZES), "sliding", "full", sliding_window=64))
    cache = CompressedCache(model, budget=BYTES)
    run(model, cache, IDS)
    told = cache.stats()
    assert told["own_bytes"] > 0 and cache._shared.budget.extra[4] >= told["own_bytes"]
    assert told["budget"]["bytes"] == BYTES
    with pytest.raises(BudgetExceeded, match="rows"):
        cache.batch_repeat_interleave(2)
    with pytest.raises(BudgetExceeded, match="no room for 64 tokens"):
        small = CompressedCache(model, budget="20kB")
        model(input_ids=IDS[:, :8], **named(small), use_cache=True)


@pytest.mark.parametrize("size", [200, 300, 450])
def test_long_chunks_run_in_which_the_end_fits(model, size):
    """What is read behind them afterwards is as good as after pieces of 64."""
    wanted, means = run(model, DynamicCache(config=model.config), IDS)[:, 850:], []
    for pieces in (64, size):
        cache = CompressedCache(model, budget=BYTES)
        run(model, cache, IDS[:, :850], pieces)
        both = run(model, cache, IDS[:, 850:], 1).log_softmax(-1), wanted.log_softmax(-1)
        divergence = torch.nn.functional.kl_div(*both, log_target=True, reduction="none").sum(-1)
        means.append(float(divergence.mean()))
    assert means[1] < 1.1 * means[0] < 0.3


@pytest.mark.parametrize("enabled", [False, True])
def test_a_chat_goes_on_turn_by_turn(model, enabled):
    chat, cache = IDS[:, :0], CompressedCache(model, budget=BYTES)
    options = {"max_new_tokens": 4, "do_sample": False, "return_dict_in_generate": True}
    with kvpact.enable(model, budget=BYTES) if enabled else contextlib.nullcontext():
        for start in range(0, 800, 200):
            chat = torch.cat([chat, IDS[:, start : start + 200]], 1)
            found = model.generate(chat, **options, **named(cache))
            chat, cache = found.sequences, cache_of(found)
            assert cache.memory_usage() <= BYTES
    assert cache.get_seq_length() == chat.shape[1] - 1 == 4 * 204 - 1
    assert cache.stats()["budget"]["bits"] < 6


def test_what_can_t_go_with_a_budget(model):
    for options in ({"rungs": ["none"]}, {"budget": BYTES, "sliding": "int:bits=8"}):
        with pytest.raises(SpecError, match="budget"):
            CompressedCache(model, **options)
    with pytest.raises(SpecError, match="budget can't go with stored prefixes"):
        prefix_cache(MemoryStore(), model, CompressedCache(model, budget=BYTES))


def test_enable_takes_a_budget_whose_ladder_is_kept_and_shares_are_of_the_exact_cache(model):
    layers = model.config.num_hidden_layers
    costs = {"key": [float(i) for i in range(layers)], "value": [0.5] * layers}
    wanted = {(i, side): x for side, own in enumerate(costs.values()) for i, x in enumerate(own)}
    recipe = {"default": "none", "ladder": costs}
    with kvpact.enable(model, recipe, budget=BYTES):
        options = {"max_new_tokens": 2, "do_sample": False, "return_dict_in_generate": True}
        found = model.generate(IDS[:, :100], **options)
    assert cache_of(found)._shared.budget.sensitivity == wanted
    assert cache_of(found).stats()["budget"]["bytes"] == BYTES
    exact = kvpact.size(model, "none", 900).rows[0].exact
    cache = CompressedCache(model, budget="50%", context=900)
    assert cache._shared.budget.bytes == exact // 2
    with pytest.raises(SpecError, match="add context="):
        CompressedCache(model, budget="50%")
    with pytest.raises(SpecError, match="rungs and context go with a budget"):
        CompressedCache(model, context=900)
