"""Layers with sliding attention, packed by a spec of their own: `CompressedCache(…, sliding=)`."""

import copy
from dataclasses import replace

import pytest
import torch
from families import crop_nothing
from tiny_configs import KINDS, SIZES, gemma3, interrupted, run
from tiny_models import tiny_model
from transformers import DynamicCache, Qwen2Config

import kvpact
from kvpact import Snapshot, errors
from kvpact.evaluate import Candidate, evaluate
from kvpact.integrations.transformers import CompressedCache, prefix_cache, register_attention
from kvpact.integrations.transformers.attention.forward import attention_forward
from kvpact.integrations.transformers.layers.sliding import CompressedSlidingLayer
from kvpact.integrations.transformers.versions import cache_of, named
from kvpact.stores import MemoryStore

WINDOW = 40
PACKED = "int:bits=8,window=0"
LEARNS = "trellis:bits=4,window=8"
IDS = torch.randint(3, 128, (3, 200), generator=torch.Generator().manual_seed(11))
SPLITS = [
    [1] * 110, [WINDOW - 1, 1, 1, 5, 1, 40, 1, 1, 70], [15, 1, 1, WINDOW - 16, 1, 20, 1, *[1] * 50],
    [WINDOW + 1, 3, *[1] * 80], [150, 1, 1, 17, 1],
]  # fmt: skip


@pytest.fixture
def model(make_model):
    return make_model(gemma3(dict(SIZES), "sliding", "full", "sliding", sliding_window=WINDOW))


def told(cache):
    rings = [x for x in cache.layers if isinstance(x, CompressedSlidingLayer)]
    return [(x.begin, x.get_seq_length()) for x in rings]


@pytest.mark.parametrize("attention", ["kvpact", "eager"])
@pytest.mark.parametrize("name", ["gemma3", "gemma4_text", "gpt_oss", "mimo_v2_flash"])
def test_exact_ones_are_those_of_transformers(name, attention):
    """Of models with sink logits and with layers that read the K and V of others, too."""
    register_attention()
    net = tiny_model(name)
    net.set_attn_implementation(attention)
    for sizes in SPLITS:
        parts = IDS[:, : sum(sizes)].split(sizes, dim=1)
        cache = CompressedCache(net, "none", sliding="none")
        got, wanted = run(net, cache, parts), run(net, DynamicCache(config=net.config), parts)
        assert (got - wanted).abs().max() < 1e-4 * wanted.abs().max()
        assert all(begin > 0 and end == sum(sizes) for begin, end in told(cache))


def test_tokens_behind_the_window_are_given_back(model):
    cache, sizes = CompressedCache(model, "none", sliding=PACKED), []
    for part in IDS[:1].split(8, dim=1):
        run(model, cache, [part])
        sizes.append(cache._rings.caches()[0].memory_usage())
        held = [cache._rings.held[0].entry(i).length for i in range(2)]
        assert all(min(WINDOW - 1, n) <= n < WINDOW - 1 + 8 + 2 * 32 for n in held)
    assert max(sizes) == max(sizes[:10])  # it grows no more
    before = cache.nbytes
    assert cache.stats()["bytes"]["total"] == cache.memory_usage() == before
    assert cache.stats()["layers"] == {"compressed": 3, "native": 0}
    exact = DynamicCache(config=model.config)
    run(model, exact, [IDS[:1]])
    whole = sum(x.keys.nbytes + x.values.nbytes for x in exact.layers)
    assert "200 tokens" in repr(cache)
    assert cache.saved == pytest.approx(1 - before / whole, rel=0.01)


@pytest.mark.parametrize("spec", [PACKED, "kivi:bits=4,window=8"])
def test_a_window_is_exactly_as_wide_over_packed_tokens(model, spec):
    """The oracle decompresses what is stored and hands it to attention of transformers."""
    caches = [CompressedCache(model, "none", sliding=spec, attention=x) for x in ("auto", "keep")]
    for sizes in SPLITS[1:]:
        outputs = []
        for cache, attention in zip(caches, ("kvpact", "sdpa"), strict=True):
            cache.reset()
            model.set_attn_implementation(attention)
            outputs.append(run(model, cache, IDS[:, : sum(sizes)].split(sizes, dim=1)))
        one, other = outputs
        exact = run(model, DynamicCache(config=model.config), IDS[:, : sum(sizes)].split(sizes, 1))
        assert (one - other).abs().max() < 1e-3 * one.abs().max()
        assert (one - exact).abs().max() > 2e-3 * exact.abs().max()


def test_keys_with_a_bias_are_packed_without_it(make_model):
    windows = {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1}
    config = Qwen2Config(**SIZES, **windows, head_dim=16)
    model = make_model(config)
    for layer in model.model.layers:
        layer.self_attn.k_proj.bias.data.normal_(0, 60, generator=torch.Generator().manual_seed(1))
    parts = IDS[:, :120].split([40, 1, 1, 20, *[1] * 58], dim=1)
    exact = run(model, DynamicCache(config=config), parts)
    differences = []
    for offsets in ("auto", None):
        given = {"key_offsets": offsets, "sliding": "int:bits=4,window=0"}
        cache = CompressedCache(model, "none", **given)
        differences.append(float((run(model, cache, parts) - exact).norm() / exact.norm()))
    assert differences[0] < differences[1] / 3
    # So they are where a window that was exact is packed.
    given = ("int:bits=4,window=0", None)
    cache, whole = (CompressedCache(model, "none", sliding=x) for x in given)
    run(model, whole, parts)
    cache.restore(whole.snapshot())
    k, wanted = (x.layers[1].keys for x in (cache, whole))
    assert 0 < (k - wanted).abs().max() < 1


@pytest.mark.parametrize("spec", ["none", PACKED, LEARNS])
@pytest.mark.parametrize("held", [3, 20, WINDOW - 1, WINDOW, WINDOW + 1, 120])
def test_a_restored_cache_goes_on_bit_for_bit(model, spec, held):
    cache, again = (CompressedCache(model, "int:bits=8", sliding=spec) for _ in range(2))
    run(model, cache, [IDS[:, : held - 2], IDS[:, held - 2 : held]])
    data = cache.snapshot().to_bytes()
    run(model, again, [IDS[:2, :50]])  # of another batch and length, which is forgotten
    again.restore(Snapshot.from_bytes(data))
    assert told(again) == told(cache)
    parts = IDS[:, held : held + 60].split([1, 1, 3, *[1] * 40, 15], dim=1)
    assert torch.equal(run(model, again, parts), run(model, cache, parts))
    assert again.snapshot().to_bytes() == cache.snapshot().to_bytes()


def test_rows_of_a_snapshot_and_of_the_cache_are_chosen_alike(model):
    cache, rows = (CompressedCache(model, "none", sliding=PACKED) for _ in range(2))
    mask = torch.ones(3, 40, dtype=torch.long)
    mask[2, :30] = 0  # padding within the window
    with torch.no_grad():
        model(IDS[:, :40], attention_mask=mask, **named(cache))
    rows.restore(cache.snapshot().select([2, 0]))
    cache.batch_select_indices(torch.tensor([2, 0]))
    assert torch.equal(*(run(model, x, [IDS[:2, 40:43]]) for x in (cache, rows)))


def test_a_snapshot_whose_records_stand_elsewhere_changes_nothing(model):
    cache, other = (CompressedCache(model, "none") for _ in range(2))
    run(model, cache, [IDS[:, :60]])
    records = [replace(record, tokens=70) for record in cache.records()]
    forged = cache.held().snapshot_with(records)
    with pytest.raises(errors.GeometryError, match="stand at 70 tokens, a layer at 60"):
        other.restore(forged)
    assert other.get_seq_length() == 0


def test_what_was_exact_may_be_packed_and_nothing_else(model):
    exact, packed = CompressedCache(model, "none"), CompressedCache(model, "none", sliding=PACKED)
    run(model, exact, [IDS[:, :90]])
    packed.restore(exact.snapshot())
    assert {end - begin for begin, end in told(packed)} == {WINDOW - 1 + 19}  # whole segments
    wanted = run(model, exact, [IDS[:, 90:92]])
    error = (run(model, packed, [IDS[:, 90:92]]) - wanted).abs().max() / wanted.abs().max()
    assert 1e-5 < error < 0.05
    with pytest.raises(errors.GeometryError, match="make the cache with sliding='int:bits=8"):
        exact.restore(packed.snapshot())
    with pytest.raises(errors.SpecError, match="layer 0 of the snapshot is of"):
        CompressedCache(model, "none", sliding=LEARNS).restore(packed.snapshot())


def test_a_snapshot_that_can_not_be_right_changes_nothing(model):
    cache = CompressedCache(model, "none", sliding=PACKED)
    run(model, cache, [IDS[:, :90]])
    twin, snapshot = copy.deepcopy(cache), cache.snapshot()
    records = {record.layer: record for record in snapshot.records()}
    assert set(records) == {0, 2}
    for change in (0, 40, -200, -1):
        record = snapshot.records()[0]
        record.tensor[0, change] ^= 1
        states = [snapshot.layer(i) for i in range(snapshot.num_layers)]
        bad = snapshot._like(states, records=[record, records[2]])
        with pytest.raises((errors.FormatError, errors.IntegrityError)):
            cache.restore(bad)
    states = [snapshot.layer(i) for i in range(snapshot.num_layers)]
    with pytest.raises(errors.GeometryError, match="lacks what the model's layer 2 holds"):
        cache.restore(snapshot._like(states, records=[records[0]]))
    assert torch.equal(*(run(model, x, [IDS[:, 90:95]]) for x in (cache, twin)))


def test_rollbacks_go_as_far_as_the_window_is_held(model):
    cache = CompressedCache(model, "none", sliding="none")
    run(model, cache, [IDS[:, :100]])
    (begin, end), _ = told(cache)
    spare = end - begin - WINDOW + 1
    twin = copy.deepcopy(cache)
    with pytest.raises(errors.KVPactError, match="before the window of 40 are no longer held"):
        cache.crop(-spare - 1)
    copies = copy.deepcopy(cache), twin
    assert spare > 0 and torch.equal(*(run(model, x, [IDS[:, 100:103]]) for x in copies))
    cache.crop(-spare)
    never = CompressedCache(model, "none", sliding="none")
    run(model, never, [IDS[:, : 100 - spare]])
    got, wanted = (run(model, x, [IDS[:, 100 - spare : 120]]) for x in (cache, never))
    assert (got - wanted).abs().max() < 1e-4 * wanted.abs().max()
    cache.reset()
    assert told(cache) == [(0, 0)] * 2


@pytest.mark.parametrize("sliding", [None, "none"])
@pytest.mark.parametrize("reached", [0, 1, 2])
def test_a_rollback_makes_layers_equal_again_which_a_failed_call_left_unlike(
    model, sliding, reached
):
    """Whichever layer the call got to, and whether windows are packed."""
    cache, never = (CompressedCache(model, "none", sliding=sliding) for _ in range(2))
    for each in (cache, never):
        run(model, each, [IDS[:, :30]])
    with interrupted(model.model.layers[reached]):
        run(model, cache, [IDS[:, 30:33]])
    if reached:
        cache.crop(-3)
    else:
        crop_nothing(cache)
    assert {layer.get_seq_length() for layer in cache.layers} == {30}
    assert torch.equal(*(run(model, x, [IDS[:, 30:80]]) for x in (cache, never)))


def test_assisted_generation_is_greedy_generation(model, greedy):
    wanted = model.generate(IDS[:1, :60], **greedy, **named(DynamicCache(config=model.config)))
    draft = copy.deepcopy(model)
    for parameter in draft.parameters():
        parameter.data.mul_(1.02)
    cache = CompressedCache(model, "none", sliding="none")
    got = model.generate(IDS[:1, :60], **greedy, **named(cache), assistant_model=draft)
    assert torch.equal(got, wanted)
    held = cache._rings.held[0].entry(0).length
    assert told(cache)[0][0] > 0 and held < WINDOW + 80


def test_a_copy_goes_on_beside(model):
    cache = CompressedCache(model, PACKED, sliding=PACKED)
    run(model, cache, [IDS[:, :90]])
    twin = copy.deepcopy(cache)
    parts = IDS[:, 90:150].split([1, 20, *[1] * 39], dim=1)
    wanted = run(model, cache, parts)
    run(model, cache, [IDS[:, 150:190]])
    assert torch.equal(run(model, twin, parts), wanted)


def test_stored_prefixes_have_the_window(model):
    store, made = MemoryStore(), []
    for _ in range(2):
        cache = CompressedCache(model, "int:bits=8", sliding=PACKED)
        prefixes = prefix_cache(store, model, cache, fingerprint="x", chunk=32)
        held = prefixes.prefill(IDS[:1, :100])
        made.append(run(model, cache, [IDS[:1, held:110]]))
    assert held == 96 and cache.tokens() == 110
    wanted = run(model, DynamicCache(config=model.config), [IDS[:1, :110]])[:, held:]
    for one in made:
        assert (one - wanted).norm() < 0.05 * wanted.norm()


def test_generation_takes_it_once_it_is_enabled(model, greedy):
    with kvpact.enable(model, "none", sliding="none"):
        result = model.generate(IDS[:, :60], **greedy, return_dict_in_generate=True)
        assert told(cache_of(result))[0][0] > 0
    assert torch.equal(result.sequences, model.generate(IDS[:, :60], **greedy))


def test_what_is_not_covered_is_refused_by_name(make_model, sizes):
    def refused(config, why, spec=PACKED, error=errors.KVPactError):
        with pytest.raises(error, match=why):
            CompressedCache(config, "none", sliding=spec)

    refused(tiny_model("llama4_text"), "has 'chunked_attention' layers")
    refused(KINDS["inkling"](sizes), "has 'hybrid_sliding' layers")
    refused(KINDS["dots3"](sizes), "has layers with latents")
    refused(KINDS["falcon_h1"](sizes), "has no layer with sliding attention")
    wide = gemma3(sizes, "sliding", "full")
    refused(wide, "window is of 16: nothing would be packed", "int:bits=8", errors.SpecError)
    refused(wide, "a recipe", "recipe:smollm2", errors.SpecError)
    with pytest.raises(errors.SpecError, match="sliding"):
        CompressedCache(wide, "none", slidng=PACKED)


def test_reading_what_was_let_go_of_is_refused(model):
    cache = CompressedCache(model, "none", sliding="none")
    run(model, cache, [IDS[:1, :20]])
    layer = cache.layers[0]
    k, v = layer.update(torch.zeros(1, 2, 60, 16), torch.zeros(1, 2, 60, 16))
    module, q = model.model.layers[0].self_attn, torch.zeros(1, 4, 60, 16)
    attention_forward(module, q, k, v, None, scaling=1.0)
    with pytest.raises(errors.StaleResult):
        k + 0


def test_an_evaluation_names_the_spec_of_windows(model):
    with pytest.raises(errors.SpecError, match="treli"):
        Candidate("none", sliding="treli:bits=4").sliding_spec()
    candidates = [
        Candidate("int:bits=8", sliding=PACKED),
        Candidate("int:bits=8", packed_only=True, sliding="int:bits=4,window=8"),
    ]
    result = evaluate(model, IDS[0], candidates, chunk=50)
    one, other = [row for row in result.rows if row.spec != "none"]
    assert one.spec == f"int:bits=8 sliding={PACKED}" and 0 < one.kl_mean < other.kl_mean
    assert (one.layers_compressed, one.layers_native) == (3, 0)
    # So few tokens give no verdict: the one of least KL.
    assert f"CompressedCache(model, 'int:bits=8', sliding={PACKED!r})" in result.answer
