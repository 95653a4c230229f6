"""What `enable` tells of a model's calls, served or not, and what a pickled model has of it."""

import copy
import pickle
import weakref

import pytest
import torch
from tiny_configs import without_collector
from torch import nn

from kvpact.integrations.transformers import CompressedCache, disable, enable
from kvpact.integrations.transformers.versions import CACHE, cache_of, named

COARSE = "int:bits=2,sinks=0,window=0"


@pytest.fixture
def called(llama, fallbacks):
    """Return a function that gives what one call of the enabled model says."""
    enable(llama, COARSE)
    yield lambda call: fallbacks(lambda: call(llama))[1]
    disable(llama)


def test_a_call_without_a_cache_is_told_once(called, ids):
    exact = ["a model that is enabled has compressed caches in `generate`; this call was given"]
    with torch.no_grad():
        said = called(lambda model: model(ids))
        assert [text[: len(exact[0])] for text in said] == exact
        assert f"{CACHE}=CompressedCache(model, spec, exact_new=False)" in said[0]
        assert called(lambda model: model(ids)) == []


@pytest.mark.parametrize(
    "call",
    [
        lambda model, ids: model.generate(ids, max_new_tokens=2),
        lambda model, ids: model.generate(ids, max_new_tokens=2, use_cache=False),
        lambda model, ids: model(ids, use_cache=False),
        lambda model, ids: model(ids, **named(CompressedCache(model, COARSE))),
        lambda model, ids: model.train()(ids, labels=ids).loss.backward(),
    ],
    ids=["generate", "generate-without-cache", "no-cache-wanted", "a-cache", "training"],
)
def test_other_calls_say_nothing_and_the_next_one_does(called, ids, call):
    assert called(lambda model: call(model, ids)) == []
    assert len(called(lambda model: model.eval()(ids))) == 1


def test_a_handle_that_is_older_than_enable_still_removes_its_hook(llama, ids):
    seen = []
    handle = llama.register_forward_pre_hook(lambda *_: seen.append(1))
    with enable(llama, COARSE):
        llama(ids, use_cache=False)
        handle.remove()
        llama(ids, use_cache=False)
    assert seen == [1] and not llama._forward_pre_hooks
    assert not llama._forward_pre_hooks_with_kwargs


def freed(holder):
    """Whether the only model of a list goes when the list lets go of it."""
    gone = weakref.ref(holder[0])
    with without_collector():
        holder.clear()
        return gone() is None


def test_a_pickled_model_has_nothing_of_it_and_no_cycle(llama):
    before = set(vars(llama))
    llama.init_continuous_batching = print  # whatever stood in a hook's place
    llama.register_forward_pre_hook(print, with_kwargs=True)
    enable(llama, COARSE)
    loaded, twin = pickle.loads(pickle.dumps(llama)), copy.deepcopy(llama)
    assert set(vars(loaded)) == before | {"init_continuous_batching"}
    assert loaded.init_continuous_batching is print
    assert list(loaded._forward_pre_hooks.values()) == [print]
    assert vars(llama)["__getstate__"]._model() is llama  # still enabled, as its copy is
    assert vars(twin)["__getstate__"]._model() is twin
    assert set(vars(twin)) == set(vars(llama)) and len(twin._forward_pre_hooks) == 2
    holders = [loaded], [twin]
    del loaded, twin
    assert [freed(holder) for holder in holders] == [True, True]


def test_a_part_of_a_larger_module_is_pickled_without_hooks(llama):
    whole = nn.ModuleDict({"inner": llama, "other": nn.Linear(2, 2)})
    enable(llama, COARSE)
    loaded = pickle.loads(pickle.dumps(whole))
    assert "__getstate__" not in vars(loaded["inner"])
    holder = [loaded["inner"]]
    del loaded
    assert freed(holder)


def test_stats_are_of_the_calls_that_are_over(llama, prompt, greedy):
    enabled = enable(llama, COARSE)
    sizes = {"most_bytes": 0, "exact_bytes": 0}
    empty = {"calls": 0, "tokens": 0, **sizes, "backends": [], "fallbacks": {}}
    assert enabled.stats() == empty
    out = llama.generate(**prompt, **greedy, return_dict_in_generate=True)
    assert enabled.stats() == {**empty, "calls": 1}
    cache = cache_of(out)
    rows, length, nbytes = out.sequences.shape[0], cache.get_seq_length(), cache.nbytes
    exact = round(nbytes / (1 - cache.saved))
    del out, cache
    one = enabled.stats()
    assert one["tokens"] == rows * length and one["most_bytes"] == nbytes
    assert one["exact_bytes"] == exact > nbytes
    assert one["backends"] == ["cpu"] and one["fallbacks"] == {}
    llama.generate(prompt["input_ids"][:1], **greedy)
    two = enabled.stats()
    assert two["calls"] == 2 and two["tokens"] == (rows + 1) * length
    assert two["most_bytes"] == nbytes
    twin = copy.deepcopy(llama)
    assert enable(twin, COARSE).stats() == empty  # a copy counts its own calls
    with enable(llama, COARSE) as again:  # enabled already
        assert again.stats() == two
    disable(llama)
    assert enabled.stats() == empty


def test_stats_name_the_backend_and_why_it_is_not_a_better_one(llama, prompt, greedy):
    with enable(llama, COARSE, backend="torch") as enabled:
        llama.generate(**prompt, **greedy)
        assert enabled.stats()["backends"] == ["torch"]
    with enable(llama, "qjl:sinks=0,window=0") as enabled:
        cache = CompressedCache(llama, "qjl:sinks=0,window=0")
        llama.generate(**prompt, **greedy, **named(cache))
        assert enabled.stats()["calls"] == 0  # of a cache that was passed its owner knows
        llama.generate(**prompt, **greedy)
        told = enabled.stats()
        assert told["backends"] == ["cpu", "torch"] or told["backends"] == ["torch"]
        assert told["fallbacks"] == cache.stats()["compute"]["reasons"] != {}


@pytest.mark.parametrize(
    ("attention", "name"), [("auto", "kvpact::attend"), ("keep", "kvpact::decompress")]
)
def test_a_profile_names_what_kvpact_does(llama, ids, monkeypatch, attention, name):
    cache = CompressedCache(llama, COARSE, attention=attention)
    with torch.no_grad():
        llama(ids, **named(cache))
        with monkeypatch.context() as context:  # no name is made where no profiler runs
            context.setattr("torch.autograd.profiler.record_function", None)
            llama(ids[:, :1], **named(cache))
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as seen:
            llama(ids[:, :1], **named(cache))
    counts = {event.key: event.count for event in seen.key_averages()}
    own = {key: count for key, count in counts.items() if key.startswith("kvpact::")}
    layers = llama.config.num_hidden_layers
    assert own == {name: layers if attention == "auto" else 2 * layers}
