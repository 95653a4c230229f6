"""Layers whose model makes entries of several tokens: DeepSeek V4."""

import copy
from dataclasses import replace

import pytest
import torch
from tiny_configs import deepseek_v4, interrupted, run
from transformers import AutoModelForCausalLM, DynamicCache

import kvpact
from kvpact import Snapshot
from kvpact.errors import GeometryError, KVPactError, SnapshotError
from kvpact.integrations.transformers import CompressedCache, prefix_cache
from kvpact.integrations.transformers.versions import LAYER_CLASSES, named
from kvpact.stores import MemoryStore

SHAPE_AND_SEED = (2, 800), 5  # groups of the index are packed, with 64 exact tokens behind them
SPECS = ("none", "int:bits=8,sinks=2,window=8", "trellis:bits=4,sinks=0,window=8")


@pytest.fixture
def model(make_model, sizes):
    return make_model(deepseek_v4(sizes))


def largest(x, y):
    return float((x - y).abs().max() / y.abs().max())


def test_the_logits_are_those_of_transformers_cache(model, ids):
    parts = ids[:, :420].split([1, 6, 1, 300, 7, 105], dim=1)
    wanted = run(model, DynamicCache(config=model.config), parts)
    assert largest(run(model, CompressedCache(model, "none"), parts), wanted) < 1e-5


@pytest.mark.parametrize(
    ("spec", "bound"),
    [(SPECS[1], 1e-7), ("turboquant:bits=4,window=8", 2e-5), ("trellis:bits=4", 2e-6)],
)
def test_steps_over_packed_entries_stay_close(spec, bound, sizes, ids):
    """All entries are chosen, so that a choice that turns over says nothing of their numbers."""
    torch.manual_seed(0)
    config = deepseek_v4(sizes, index_topk=500)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    parts = ids[:, :750].split([700, *[1] * 30, 20], dim=1)
    cache = CompressedCache(model, spec)
    both = (run(model, x, parts) for x in (cache, DynamicCache(config=config)))
    got, wanted = (x[:, 700:].double().log_softmax(-1) for x in both)
    kl = (wanted.exp() * (wanted - got)).sum(-1).mean()
    assert cache.layers[2].index_codes is not None and 0 < kl < bound


def test_the_choice_is_active(make_model, sizes, ids):
    """Otherwise the test before this one would say nothing of the index."""
    few, all_ = (make_model(deepseek_v4(sizes, index_topk=n)) for n in (4, 500))
    all_.load_state_dict(few.state_dict())
    one, other = (run(x, CompressedCache(x, "none"), [ids[:, :60]]) for x in (few, all_))
    assert torch.equal(one[:, :16], other[:, :16])
    assert largest(one, other) > 0.01


@pytest.mark.parametrize("spec", SPECS[1:])
def test_packed_entries_go_wherever_the_window_goes(spec, model, ids):
    cache = CompressedCache(model, spec)
    run(model, cache, ids[:, :702].split([700, 2], dim=1))
    assert cache.layers[2].index_codes is not None
    data = cache.snapshot(token_ids=ids[:, :702]).to_bytes()
    fork, again = copy.deepcopy(cache), CompressedCache(model, spec)
    again.restore(Snapshot.from_bytes(data))
    assert again.snapshot(token_ids=ids[:, :702]).to_bytes() == data
    rows = copy.deepcopy(cache)
    rows.batch_select_indices(torch.tensor([1]))
    parts = ids[:, 702:].split([1, 1, 40, 56], dim=1)
    wanted = run(model, cache, parts)
    assert torch.equal(run(model, fork, parts), wanted)
    assert torch.equal(run(model, again, parts), wanted)
    one = run(model, rows, [part[1:] for part in parts])
    assert largest(one, wanted[1:]) < 1e-5


def test_bytes_of_everything_are_counted(model, ids):
    held = CompressedCache(model, "int:bits=4,sinks=0,window=0")
    exact = DynamicCache(config=model.config)
    for cache in (held, exact):
        run(model, cache, [ids])
    entries = {name: 2 * 800 // rate * 32 * 4 for name, rate in (("hca", 8), ("csa", 4))}
    window = 2 * 15 * 32 * 4
    whole = held._summary()
    # the sliding layer has its window twice, as K and as V, and 800 is a multiple of all rates
    layer = held.layers[2]
    parts = [layer.index_codes, layer.index_scale, layer.index_tail]
    parts += [*layer.overlap_kv.values(), *layer.overlap_gate.values()]
    own = 4 * window + sum(x.nbytes for x in parts)
    assert whole.nbytes == held.memory_usage() == held.stats()["bytes"]["total"] + own
    assert held.stats()["own_bytes"] == own
    assert held.stats()["bytes"]["total"] < 0.35 * sum(entries.values())


@pytest.mark.parametrize("held", [1, 3, 4, 7, 8, 9])
def test_a_short_text_is_restored(held, model, ids):
    """Before the first entry, and at its border, there is nothing but windows and buffers."""
    cache, again = (CompressedCache(model, "int:bits=8") for _ in range(2))
    run(model, cache, [ids[:, :held]])
    again.restore(Snapshot.from_bytes(cache.snapshot(token_ids=ids[:, :held]).to_bytes()))
    assert again.snapshot().tokens == held
    assert torch.equal(*(run(model, x, [ids[:, held : held + 9]]) for x in (cache, again)))


@pytest.mark.parametrize("held", [1, 3, 5, 9])
def test_rows_of_a_short_text(held, model, ids):
    """Some streams hold nothing yet."""
    for rows, change in (
        ([1], lambda cache: cache.batch_select_indices(torch.tensor([1]))),
        ([0, 0, 1, 1], lambda cache: cache.batch_repeat_interleave(2)),
        ([1, 1], lambda cache: cache.reorder_cache(torch.tensor([1, 1]))),
    ):
        changed, never = (CompressedCache(model, "int:bits=8,sinks=0,window=0") for _ in range(2))
        run(model, changed, [ids[:, :held]])
        change(changed)
        run(model, never, [ids[rows, :held]])
        parts = ids[rows, held:30].split([1, 29 - held], 1)
        got, wanted = (run(model, x, parts) for x in (changed, never))
        assert largest(got, wanted) < 1e-5


@pytest.mark.parametrize("wrong", ["buffer_kv.1", "buffer_gate.0", "overlap_kv.0", "index_tail"])
@pytest.mark.parametrize("how", ["left out", "cut"])
def test_a_snapshot_that_lacks_a_part_changes_nothing(wrong, how, model, ids):
    cache, other = (CompressedCache(model, "none") for _ in range(2))
    run(model, cache, [ids[:, :27]])
    run(model, other, [ids[:, :9]])
    twin = copy.deepcopy(other)
    records = cache.snapshot().records()
    place = next(i for i, x in enumerate(records) if x.layer == 2 and x.name == wrong)
    if how == "left out":
        del records[place]
    else:
        records[place] = replace(records[place], tensor=records[place].tensor[:, :-1])
    forged = cache.held().snapshot_with(records)
    with pytest.raises(GeometryError):
        other.restore(Snapshot.from_bytes(forged.to_bytes()))
    assert torch.equal(*(run(model, x, [ids[:, 9:20]]) for x in (other, twin)))


def test_entries_of_other_tokens_are_refused(model, ids):
    cache, longer = (CompressedCache(model, "none") for _ in range(2))
    run(model, cache, [ids[:, :27]])
    run(model, longer, [ids[:, :35]])
    forged = longer.held().snapshot_with(cache.snapshot().records())
    with pytest.raises(GeometryError, match="4 entries for 27 tokens"):
        cache.restore(forged)


def test_what_entries_can_t_do_is_refused_by_name(model, ids):
    cache = CompressedCache(model, "none")
    run(model, cache, [ids[:1, :10]])
    with pytest.raises(KVPactError, match="an entry stands for several tokens"):
        cache.crop(-1)
    with MemoryStore() as store, pytest.raises(SnapshotError, match="no chunks of a prefix"):
        prefix_cache(store, model, cache)
    assert not cache.is_croppable
    logits = model(ids[:1, 10:18], **named(cache)).logits
    with pytest.raises(KVPactError, match="no gradients"):
        logits.sum().backward()


def test_an_interrupted_call_makes_no_snapshot(model, ids):
    cache = CompressedCache(model, "none")
    run(model, cache, [ids[:, :20]])
    with interrupted(model.model.layers[2].self_attn.compressor):
        run(model, cache, [ids[:, 20:22]])
    with pytest.raises(SnapshotError, match="hold 20 and 22 tokens"):
        cache.snapshot()
    cache.reset()
    fresh = CompressedCache(model, "none")
    assert torch.equal(*(run(model, x, [ids[:, :30]]) for x in (cache, fresh)))


def test_transformers_own_layers_stay_what_they_are(model):
    CompressedCache(model, "none")
    assert "kvpact" not in repr([x.__module__ for x in LAYER_CLASSES.values()])
    assert type(DynamicCache(config=model.config).layers[1]).__name__ == "DeepseekV4HCACache"


def test_the_model_keeps_its_own_attention(model, fallbacks):
    _, said = fallbacks(lambda: CompressedCache(model, "none"))
    assert model.config._attn_implementation == "eager"
    assert len(said) == 1 and "streams that it compresses itself" in said[0]
    model.config._attn_implementation = "kvpact"
    with pytest.raises(KVPactError, match="streams that it compresses itself"):
        CompressedCache(model, "none")


@pytest.mark.parametrize("tokens", [3, 50, 800])
def test_the_bytes_are_those_that_size_tells(tokens, model, ids):
    cache, spec = CompressedCache(model, SPECS[1]), SPECS[1]
    run(model, cache, [ids[:, :tokens]])
    told = kvpact.size(model.config, specs=spec, tokens=tokens, batch=2, dtype="float32")
    assert cache.memory_usage() == told.rows[0].total
    assert cache.stats()["tokens"] == tokens and f" {tokens} tokens" in repr(cache)
