"""Layers that choose the tokens they attend to: the choice is honoured, and is kept with K."""

import copy
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_configs import INDEXED, interrupted, run
from tiny_models import tiny_model
from transformers import DynamicCache, LlamaConfig

from kvpact import Snapshot
from kvpact.errors import GeometryError, KVPactError, SnapshotError
from kvpact.integrations.layer_shape import LayerShape
from kvpact.integrations.transformers import CompressedCache, prefix_cache, register_attention
from kvpact.integrations.transformers.held.shared import SharedState
from kvpact.integrations.transformers.layers.indexed import CompressedIndexedLayer, chosen
from kvpact.integrations.transformers.versions import named
from kvpact.spec import parse_spec
from kvpact.stores import MemoryStore

SHAPE_AND_SEED = (3, 90), 2  # beyond the 24 that are chosen
every_model = pytest.mark.parametrize("name", INDEXED)
EAGER = {"hunyuan_v4"}
"""Models that transformers does not let attend by ``sdpa``."""


def parts_of(ids):
    return ids.split([40, 1, 1, 8, 1, ids.shape[1] - 51], dim=1)


def close(one, other):
    return (one - other).abs().max() < 1e-5 * other.abs().max()


@every_model
def test_it_attends_to_what_the_index_chooses(name, ids):
    model = tiny_model(name)
    wanted = run(model, DynamicCache(config=model.config), parts_of(ids))
    cache = CompressedCache(model.config, "none")
    assert model.config._attn_implementation == ("eager" if name in EAGER else "kvpact")
    assert close(run(model, cache, parts_of(ids)), wanted)
    compressed = {"minimax_m3": 3, "qwen4": 1, "glm5": 1}.get(name, 2)
    assert cache.stats()["layers"]["compressed"] == compressed
    # The choice matters: where it is all tokens, the result is another one.
    few = {"index_topk_blocks": 1000} if name == "minimax_m3" else {"index_topk": 10_000}
    everything = tiny_model(name, **few)
    other = run(everything, CompressedCache(everything.config, "none"), parts_of(ids))
    assert close(other[:, :24], wanted[:, :24])
    assert (other - wanted)[:, 40:].abs().max() > 0.01 * wanted.abs().max()


@every_model
def test_attention_kvpact_honours_the_choice_over_any_cache(name, ids):
    register_attention()
    model, own = tiny_model(name), tiny_model(name)
    own.config._attn_implementation = "kvpact"
    wanted = run(model, DynamicCache(config=model.config), parts_of(ids))
    assert close(run(own, DynamicCache(config=own.config), parts_of(ids)), wanted)


def test_up_to_the_tokens_that_it_chooses_it_is_full_attention_bit_for_bit(ids):
    models = tiny_model("deepseek_v32"), tiny_model("deepseek_v32", index_topk=10_000)
    got = [run(x, CompressedCache(x.config, "int:bits=8"), ids[:, :24].split(8, 1)) for x in models]
    assert torch.equal(*got)


@pytest.mark.parametrize("name", ["deepseek_v32", "qwen4"])
def test_beams_and_left_padding(name, ids, greedy):
    model = tiny_model(name)
    mask = torch.ones_like(ids)
    mask[0, :30], mask[1, :7] = 0, 0
    for options in (greedy, {**greedy, "num_beams": 3, "max_new_tokens": 5}):
        given = {"attention_mask": mask, **options}
        wanted = model.generate(ids, **given, **named(DynamicCache(config=model.config)))
        for _ in range(2):
            cache = CompressedCache(model.config, "none")
            assert torch.equal(model.generate(ids, **given, **named(cache)), wanted)


@every_model
def test_the_index_goes_wherever_k_goes(name, ids):
    """Into snapshots, prefixes and copies, and with its rows."""
    model, spec = tiny_model(name), "int:bits=8,window=8"
    cache = CompressedCache(model.config, spec)
    run(model, cache, [ids[:, :48], ids[:, 48:64]])
    data, fork = cache.snapshot().to_bytes(), copy.deepcopy(cache)
    wanted = run(model, cache, ids[:, 64:].split([1, 25], 1))
    again = CompressedCache(model.config, spec)
    again.restore(Snapshot.from_bytes(data))
    for other in (again, fork):
        assert torch.equal(run(model, other, ids[:, 64:].split([1, 25], 1)), wanted)
    rows = torch.tensor([2, 0])
    again.restore(Snapshot.from_bytes(data).select(rows.tolist()))
    assert close(run(model, again, ids[rows, 64:].split([1, 25], 1)), wanted[rows])
    again.restore(Snapshot.from_bytes(data))
    again.reorder_cache(torch.tensor([1, 1, 0]))
    again.batch_repeat_interleave(2)
    twice = torch.tensor([1, 1, 1, 1, 0, 0])
    assert close(run(model, again, ids[twice, 64:].split([1, 25], 1)), wanted[twice])


@every_model
def test_a_prefix_has_the_index(name, ids):
    model = tiny_model(name)
    one = ids[:1]
    with MemoryStore() as store:
        caches = [CompressedCache(model.config, "none") for _ in range(2)]
        for cache in caches:
            prefixes = prefix_cache(store, model, cache, fingerprint="one", chunk=32)
            held = prefixes.prefill(one[:, :70])
        assert held == 64 and prefixes.written == 0
        went_on, loaded = (run(model, x, one[:, 64:].split([1, 25], 1)) for x in caches)
        assert torch.equal(loaded, went_on)


@pytest.mark.parametrize("name", ["deepseek_v32", "minimax_m3", "axk2"])
def test_a_rollback_takes_the_index_back(name, ids):
    model = tiny_model(name)
    cache, never = (CompressedCache(model.config, "none") for _ in range(2))
    run(model, cache, [ids[:, :64]])
    cache.crop(-14)
    run(model, never, [ids[:, :50]])
    got, wanted = (run(model, x, ids[:, 50:].split([1, 39], 1)) for x in (cache, never))
    assert close(got, wanted)
    cache.reset()
    never.reset()
    assert torch.equal(*(run(model, x, [ids[:2, :50]]) for x in (cache, never)))


def test_an_index_that_is_out_of_step_is_refused(ids):
    model = tiny_model("deepseek_v32")
    cache = CompressedCache(model.config, "int:bits=8")
    run(model, cache, [ids[:, :40]])
    layer = cache.layers[1]
    layer.indexer_keys = torch.cat([layer.indexer_keys, layer.indexer_keys[:, :2]], 1)
    with pytest.raises(KVPactError, match="index holds 42 tokens where K and V hold 40: a call"):
        run(model, cache, [ids[:, 40:43]])
    cache.reset()
    run(model, cache, [ids[:, :40]])


@pytest.fixture
def packed():
    """Return a cache of 200 tokens of three rows, whose index is packed, its model and the rest."""
    model = tiny_model("deepseek_v32")
    more = torch.randint(3, 128, (3, 220), generator=torch.Generator().manual_seed(5))
    cache = CompressedCache(model.config, "int:bits=8,window=8")
    run(model, cache, [more[:, :150], more[:, 150:200]])
    return cache, model, more


def test_the_bytes_of_an_index_are_those_that_are_counted(packed):
    """The formula of `kvpact size` beside the tensors that are held."""
    cache, _, _ = packed
    for layer in cache.layers:
        shape = LayerShape("indexed_attention", True, 1, 32, 16, True, index_width=32)
        held = layer.index_codes, layer.index_scale, layer.index_tail
        assert shape.own_bytes(200, 3, 4, packed=True) == sum(x.nbytes for x in held)


def test_a_packed_index_is_restored_bit_for_bit(packed):
    cache, model, ids = packed
    layer = cache.layers[0]
    assert layer.index_codes.shape == (3, 128, 32) and layer.index_tail.shape == (3, 72, 32)
    again = CompressedCache(model.config, cache.spec)
    snapshot = cache.snapshot()
    again.restore(Snapshot.from_bytes(snapshot.to_bytes()))
    assert again.snapshot().to_bytes() == snapshot.to_bytes()
    wanted, got = (run(model, x, ids[:, 200:].split([1, 19], 1)) for x in (cache, again))
    assert torch.equal(got, wanted)
    # The index matters: without its packed part the result is another one.
    again.restore(snapshot)
    for other in again.layers:
        other.index_codes.zero_()
    assert (run(model, again, ids[:, 200:].split([1, 19], 1)) - wanted).abs().max() > 0.01


@pytest.mark.parametrize("wrong", [
    lambda x: None if x.name == "index_codes" else x,
    lambda x: None if x.name == "index_scale" else x,
    lambda x: replace(x, tensor=x.tensor[:, 1:]) if x.name == "index_tail" else x,
    lambda x: replace(x, tensor=x.tensor[:, :64]) if x.name == "index_codes" else x,
    lambda x: replace(x, tensor=x.tensor.to(torch.int16)) if x.name == "index_codes" else x,
    lambda x: None if x.name.startswith("index") else x,
    lambda x: replace(x, tensor=x.tensor * torch.inf) if x.name == "index_scale" else x,
    lambda x: replace(x, tensor=x.tensor.to(torch.int8)) if x.name == "index_tail" else x,
    lambda x: replace(x, name="index_heads") if x.name == "index_tail" else x,
])  # fmt: skip
def test_an_index_that_does_not_fit_is_refused_and_changes_nothing(wrong, packed):
    cache, model, ids = packed
    records = [x for x in map(wrong, cache.snapshot().records()) if x is not None]
    forged = cache.held().snapshot_with(records)
    twin = copy.deepcopy(cache)
    with pytest.raises(GeometryError, match="the snapshot has"):
        cache.restore(Snapshot.from_bytes(forged.to_bytes()))
    assert torch.equal(*(run(model, x, [ids[:, 200:]]) for x in (cache, twin)))


def test_padded_rows_of_minimax_m3_attend_to_no_block_that_is_left_out(ids):
    """There were as many choices as blocks, and some of them were none."""
    model = tiny_model("minimax_m3")
    mask = torch.ones_like(ids[:, :22])
    mask[1, :7] = 0
    places = (mask.cumsum(-1) - 1).clamp(min=0)
    given = {"attention_mask": mask, "position_ids": places}
    with torch.no_grad():
        caches = DynamicCache(config=model.config), CompressedCache(model.config, "none")
        wanted, got = (model(ids[:, :22], **named(x), **given).logits for x in caches)
    assert close(got[mask == 1], wanted[mask == 1])


def test_an_index_keeps_no_graph_of_gradients(ids):
    model = tiny_model("minimax_m3")
    cache = CompressedCache(model.config, "none")
    with pytest.raises(KVPactError, match="no gradients"):
        model(ids[:, :30], **named(cache)).logits.sum().backward()
    assert not cache.layers[1].index_tail.requires_grad
    copy.deepcopy(cache)


def test_a_rollback_after_an_interrupt_mends_all_layers(ids):
    """Layers that the call never reached lose none of their index."""
    model = tiny_model("deepseek_v32")
    cache, never = (CompressedCache(model.config, "none") for _ in range(2))
    run(model, cache, [ids[:, :40]])
    run(model, never, [ids[:, :40]])
    with interrupted(model.model.layers[1]):
        run(model, cache, [ids[:, 40:45]])
    with pytest.raises(SnapshotError, match="hold 40 and 45 tokens"):
        cache.snapshot()
    cache.crop(-5)
    got, wanted = (run(model, x, [ids[:, 40:]]) for x in (cache, never))
    assert close(got, wanted)


def test_positions_that_are_out_of_step_are_refused(ids):
    model = tiny_model("qwen4")
    cache = CompressedCache(model.config, "none")
    run(model, cache, [ids[:, :40]])
    layer = cache.layers[1]
    layer.indexer_position_ids = layer.indexer_position_ids[..., [*range(40), 39]]
    with pytest.raises(KVPactError, match="begin again with reset"):
        run(model, cache, [ids[:, 40:43]])
    with pytest.raises(SnapshotError):
        cache.snapshot()


def test_nothing_is_left_of_an_index_without_tokens(packed):
    cache, model, ids = packed
    cache.crop(-200)
    assert cache.layers[0].index_tail is None and cache.layers[0].index_codes is None
    cache.batch_repeat_interleave(2)
    run(model, cache, [ids[[0, 0, 1, 1, 2, 2], :30]])


@pytest.mark.parametrize("left", [199, 136, 129, 128, 127, 70, 64, 63, 1])
def test_a_rollback_into_the_packed_index(left, packed):
    """The tokens kept have the keys that they had."""
    cache, model, ids = packed
    before = [layer.indexer_keys for layer in cache.layers]
    cache.crop(left - 200)
    for layer, keys in zip(cache.layers, before, strict=True):
        assert torch.allclose(layer.indexer_keys, keys[:, :left], atol=1e-6)
        layer.check_parts(vars(layer), left)
    run(model, cache, [ids[:, left : left + 1]])
    assert cache.layers[0].indexer_keys.shape[1] == left + 1


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_an_index_of_any_history_is_that_of_its_tokens(data):
    config = LlamaConfig(num_hidden_layers=1)
    layer = CompressedIndexedLayer(SharedState(config, True, [parse_spec("int:bits=8")]), 0)
    generator = torch.Generator().manual_seed(0)
    exact, total = torch.zeros(2, 0, 3), 0
    layer.get_seq_length = lambda: total
    for _ in range(data.draw(st.integers(1, 8))):
        if total and data.draw(st.booleans()):
            removed = data.draw(st.integers(1, total))
            exact, total = exact[:, : total - removed], total - removed
            layer.fit_index()
        else:
            new = torch.randn(2, data.draw(st.integers(1, 150)), 3, generator=generator)
            exact = torch.cat([exact, new], 1)
            whole = layer.update_indexer(new)
            total = exact.shape[1]
            assert torch.equal(whole[:, -new.shape[1] :], new), "new ones are used as they are"
        if total:
            layer.check_parts(vars(layer), total)
            # Groups that a rollback cut are rounded twice, by scales that are at most as large.
            steps = exact.abs().amax() / 127 if exact.numel() else 0
            held = layer.indexer_keys
            assert held.shape == exact.shape and (held - exact).abs().max() <= 4 * steps
            assert layer.index_tail.shape[1] < 128 + 64


@pytest.mark.parametrize("kind", ["none", "bool", "float"])
def test_a_choice_narrows_the_mask_that_is_there(kind):
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(-1, 13, (2, 3, 4), generator=generator)
    seen = torch.ones(3, 13, dtype=torch.bool).tril(10).expand(2, 1, 3, 13)
    mask = {"none": None, "bool": seen, "float": torch.zeros(2, 1, 3, 13).masked_fill(~seen, -1e9)}
    got = chosen(torch.nn.Identity(), mask[kind], 3, 13, {"indices": tokens})
    for row in range(2):
        for query in range(3):
            kept = {t for t in tokens[row, query].tolist() if 0 <= t <= 10 + query}
            value = got[row, 0, query]
            allowed = value if value.dtype == torch.bool else value == 0
            assert set(allowed.nonzero().flatten().tolist()) == kept
    every = torch.arange(4).expand(2, 3, 4)
    assert chosen(torch.nn.Identity(), mask[kind], 3, 4, {"indices": every}) is mask[kind]
    if kind == "none":
        few = chosen(torch.nn.Identity(), None, 3, 4, {"indices": every.where(every != 1, -1)})
        assert not few[..., 1].any(), "of as many as there are tokens, one is none"


def test_blocks_of_a_size_that_nobody_tells_are_refused():
    blocks = torch.zeros(1, 1, 1, 2, dtype=torch.long)
    with pytest.raises(KVPactError, match="does not say how large they are"):
        chosen(torch.nn.Identity(), None, 1, 40, {"block_indices": blocks})
