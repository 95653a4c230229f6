"""Keys that are made of values (Gemma 4, `attention_k_eq_v`): values alone are held."""

import copy

import pytest
import torch
import transformers
from tiny_configs import SIZES, gemma4_k_eq_v
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache, LlamaConfig

import kvpact
from kvpact import Snapshot
from kvpact.data import model_table
from kvpact.errors import BackendUnavailable, GeometryError, KVPactError, SpecError
from kvpact.integrations.transformers import CompressedCache, enable, prefix_cache
from kvpact.integrations.transformers.layers.made_keys import CompressedValueLayer
from kvpact.integrations.transformers.versions import cache_of, named
from kvpact.stores import MemoryStore

if not hasattr(transformers, "Gemma4Config"):
    pytest.skip("this transformers has no Gemma 4", allow_module_level=True)

IDS = torch.randint(3, 128, (2, 300), generator=torch.Generator().manual_seed(3))
GREEDY = {"max_new_tokens": 20, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
SPECS = ("turboquant:bits=4", "trellis:bits=4", "int:bits=8", "kivi:bits=2", "fp8")


def made(dtype=torch.float32, *kinds, **more):
    """Return a model whose `k_norm` has weights of its own for each channel."""
    torch.manual_seed(0)
    config = gemma4_k_eq_v(SIZES, *kinds, **{"global_head_dim": 64, **more})
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").eval()
    for name, parameter in model.named_parameters():
        if "k_norm" in name or "q_norm" in name:
            parameter.data.uniform_(0.2, 0.6)
        else:
            parameter.data.mul_(1.5)
    return model.to(dtype)


@pytest.fixture(scope="module")
def model():
    return made()


def run(model, cache, ids, begin=0, sizes=(150, 1, 1, 5, 100, 3), positions=None):
    logits = []
    for part in ids.split(list(sizes), dim=1):
        end = begin + part.shape[1]
        given = torch.arange(begin, end)[None] if positions is None else positions[begin:end][None]
        with torch.no_grad():
            logits.append(model(part, position_ids=given, **named(cache)).logits)
        begin = end
    return torch.cat(logits, 1)


def packed(cache):
    """Return the bytes of K and V, without the positions and windows beside them."""
    return cache.stats()["bytes"]["total"]


def value_layers(cache):
    return [layer for layer in cache.layers if isinstance(layer, CompressedValueLayer)]


@pytest.mark.parametrize("kinds", [("full",) * 3, ("sliding", "full", "sliding", "full")])
def test_exact_values_give_the_same_logits_bit_for_bit_in_half_of_the_bytes(kinds):
    model = made(torch.float32, *kinds)
    ids, sizes = IDS[:, :260], (150, 1, 1, 5, 100, 3)
    apart, alone = CompressedCache(model, "none"), CompressedCache(model, "none", k_eq_v=True)
    wanted = run(model, DynamicCache(config=model.config), ids, sizes=sizes)
    run(model, apart, ids, sizes=sizes)
    assert torch.equal(run(model, alone, ids, sizes=sizes), wanted)
    assert packed(apart) == 2 * packed(alone)
    layers = value_layers(alone)
    assert layers and not any(layer.apart for layer in layers)
    assert all(layer.get_seq_length() == 260 for layer in layers)
    theirs = DynamicCache(config=model.config)
    run(model, theirs, ids, sizes=sizes)
    for mine, other in zip(alone.layers, theirs.layers, strict=True):
        if isinstance(mine, CompressedValueLayer):
            assert torch.equal(mine.keys, other.keys) and torch.equal(mine.values, other.values)


@pytest.mark.parametrize("part", ["weights", "positions"])
def test_weights_and_positions_are_what_keys_are_made_of(model, part):
    cache = CompressedCache(model, "none", k_eq_v=True)
    run(model, cache, IDS[:, :100], sizes=(100,))
    wanted = run(model, copy.deepcopy(cache), IDS[:, 100:110], 100, (10,))
    for layer in value_layers(cache):
        if part == "weights":
            layer._begun = layer._keys.begun()
            layer._begun.weight.fill_(1)
        else:
            layer.positions = torch.arange(99, -1, -1, dtype=torch.int32).expand(2, -1).clone()
            layer.positions[:, -1] = 99
    if part == "weights":
        with pytest.raises(KVPactError, match="k_eq_v=False"):
            run(model, cache, IDS[:, 100:110], 100, (10,))
        return
    other = run(model, cache, IDS[:, 100:110], 100, (10,))
    assert (other - wanted).abs().max() > 0.1 * wanted.abs().max()


@pytest.mark.parametrize("spec", SPECS)
def test_bytes_are_half_of_those_of_keys_and_values_apart(model, spec):
    apart, alone = CompressedCache(model, spec), CompressedCache(model, spec, k_eq_v=True)
    for cache in (apart, alone):
        run(model, cache, IDS, sizes=(150, 1, 1, 5, 100, 43))
    ratio = packed(apart) / packed(alone)
    print(f"{spec}: {ratio:.3f} times smaller than K and V apart")
    assert ratio >= 2.0 if spec != "kivi:bits=2" else 1.99
    assert alone.nbytes == alone.memory_usage() == packed(alone)
    assert alone._summary().exact == apart._summary().exact


@pytest.mark.parametrize("spec", ["int:bits=8", "none"])
def test_the_same_tokens_as_keys_and_values_apart(model, spec):
    caches = CompressedCache(model, spec), CompressedCache(model, spec, k_eq_v=True)
    apart, alone = (model.generate(IDS[:, :150], **GREEDY, **named(x)) for x in caches)
    assert torch.equal(apart, alone)
    assert packed(caches[0]) == 2 * packed(caches[1])


@pytest.mark.parametrize("spec", ["turboquant:bits=4", "none"])
def test_attention_is_that_over_the_keys_which_the_cache_tells(model, spec):
    """With K and V read whole and ``sdpa``, logits are the same."""
    cache = CompressedCache(model, spec, k_eq_v=True)
    run(model, cache, IDS[:, :200], sizes=(150, 50))
    plain = DynamicCache(config=model.config)
    for index, layer in enumerate(cache.layers[:2]):
        plain.update(layer.keys, layer.values, index)
    wanted = run(model, plain, IDS[:, 200:207], 200, (7,))
    got = run(model, cache, IDS[:, 200:207], 200, (7,))
    assert (got - wanted).abs().max() <= 1e-4 * wanted.abs().max()


@pytest.mark.parametrize("attention", ["auto", "keep"])
@pytest.mark.parametrize("spec", ["int:bits=8", "none"])
def test_rows_with_padding_have_positions_of_their_own(model, spec, attention):
    mask = torch.ones_like(IDS[:, :120])
    mask[0, :30] = 0
    options = {"attention": attention}
    caches = [CompressedCache(model, spec, **options, k_eq_v=x) for x in (False, True)]
    given = {"attention_mask": mask, **GREEDY}
    apart, alone = (model.generate(IDS[:, :120], **given, **named(x)) for x in caches)
    assert torch.equal(apart, alone)
    held = value_layers(caches[1])[0].positions
    assert caches[1].stats()["own_bytes"] == 2 * held.nbytes == caches[1].nbytes - packed(caches[1])
    assert torch.equal(held[0, 30:], held[1, : held.shape[1] - 30]) and not held[0, :30].any()


def test_a_row_may_be_padding_alone_in_the_first_call(model):
    mask, theirs = torch.ones_like(IDS[:, :60]), DynamicCache(config=model.config)
    mask[0, :40] = 0
    places = (mask.cumsum(1) - 1).masked_fill(mask == 0, 1)
    cache, logits = CompressedCache(model, "none", k_eq_v=True), []
    for held in (cache, theirs):
        for start, end in ((0, 35), (35, 60)):
            given = {"attention_mask": mask[:, :end], "position_ids": places[:, start:end]}
            with torch.no_grad():
                found = model(IDS[:, start:end], **given, **named(held)).logits
        logits.append(found)
    assert torch.equal(logits[0][:, 10:], logits[1][:, 10:])
    assert torch.equal(value_layers(cache)[0].positions.long(), places)


def test_other_positions_of_the_first_call_leave_keys_and_values_apart(model):
    places = torch.arange(0, 600, 2)
    cache = CompressedCache(model, "none", k_eq_v=True)
    for layer in value_layers(cache):  # as a first call leaves them that was refused
        layer.positions = torch.zeros(2, 150, dtype=torch.int32)
    with pytest.warns(Warning, match="K and V are held apart"):
        got = run(model, cache, IDS, positions=places, sizes=(150, 150))
    theirs = DynamicCache(config=model.config)
    wanted = run(model, theirs, IDS, positions=places, sizes=(150, 150))
    assert (got - wanted).abs().max() <= 1e-5 * wanted.abs().max()
    assert all(layer.apart and layer.positions is None for layer in value_layers(cache))
    cache.reset()
    run(model, cache, IDS[:, :100], sizes=(100,))
    assert not any(layer.apart for layer in value_layers(cache))


@pytest.mark.parametrize("what", ["positions", "weights"])
def test_other_positions_or_weights_later_are_refused_and_leave_the_cache_as_it_was(what):
    model = made()
    cache = CompressedCache(model, "turboquant:bits=4", k_eq_v=True)
    run(model, cache, IDS[:, :150], sizes=(150,))
    wanted = run(model, copy.deepcopy(cache), IDS[:, 150:160], 150, (10,))
    weight = model.model.layers[0].self_attn.k_norm.weight
    before, places = weight.detach().clone(), torch.arange(400)
    if what == "weights":
        weight.data.mul_(1.1)
    else:
        places[155:] += 300
    with pytest.raises(KVPactError, match="k_eq_v=False"):
        run(model, cache, IDS[:, 150:160], 150, (10,), positions=places)
    weight.data.copy_(before)
    assert cache.get_seq_length() == 150
    assert torch.equal(run(model, cache, IDS[:, 150:160], 150, (10,)), wanted)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_in_16_bits_keys_are_made_within_rounding(dtype):
    model = made(dtype)
    apart, alone = CompressedCache(model, "none"), CompressedCache(model, "none", k_eq_v=True)
    for cache in (apart, alone):
        run(model, cache, IDS[:, :100], sizes=(100,))
    assert not any(layer.apart for layer in value_layers(alone))
    for mine, other in zip(alone.layers[:1], apart.layers[:1], strict=True):
        assert torch.equal(mine.values, other.values)
        error = (mine.keys.float() - other.keys.float()).abs().max() / other.keys.abs().max()
        assert error <= 4 * torch.finfo(dtype).eps
    assert packed(apart) == 2 * packed(alone)


@pytest.mark.parametrize("rows, tokens", [(1, 1), (2, 33), (5, 7), (64, 256)])
@pytest.mark.parametrize("factor", [0.25, 1.0])
def test_quick_logits_are_those_of_keys_made_whole(rows, tokens, factor):
    rope = {"rope_type": "proportional", "partial_rotary_factor": factor, "rope_theta": 1e4}
    sliding = {"rope_type": "default", "rope_theta": 1e4}
    kinds = {"full_attention": rope, "sliding_attention": sliding}
    model = made(torch.float32, rope_parameters=kinds)
    keys = value_layers(CompressedCache(model, "none", k_eq_v=True))[0]._keys.begun()
    generator = torch.Generator().manual_seed(rows)
    q = torch.randn(2, 2, rows, 64, generator=generator)
    v = torch.randn(2, 2, tokens, 64, generator=generator)
    positions = torch.randint(0, 900, (2, tokens + 3), generator=generator, dtype=torch.int32)
    making = keys.at(positions, v)
    assert making._table[0].shape[1] == 32 * factor
    wanted = q @ making.make(v, 3).mT
    for _ in range(2):
        assert torch.allclose(making.logits(q, v, 3), wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("spec", ["trellis:bits=4", "none"])
def test_snapshots_are_restored_bit_for_bit(model, spec):
    cache = CompressedCache(model, spec, k_eq_v=True)
    run(model, cache, IDS[:, :200], sizes=(150, 50))
    data = cache.snapshot().to_bytes()
    wanted = run(model, cache, IDS[:, 200:210], 200, (10,))
    again = CompressedCache(model, spec, k_eq_v=True)
    again.restore(Snapshot.from_bytes(data))
    assert torch.equal(run(model, again, IDS[:, 200:210], 200, (10,)), wanted)
    assert packed(again) == packed(cache)
    with pytest.raises(GeometryError, match="k_eq_v=True"):
        CompressedCache(model, spec).restore(Snapshot.from_bytes(data))


def test_a_snapshot_of_keys_and_values_apart_is_restored_as_that(model):
    cache = CompressedCache(model, "int:bits=8")
    run(model, cache, IDS[:, :200], sizes=(150, 50))
    again = CompressedCache(model, "int:bits=8", k_eq_v=True)
    again.restore(cache.snapshot())
    wanted, got = (run(model, x, IDS[:, 200:210], 200, (10,)) for x in (cache, again))
    assert torch.equal(got, wanted) and all(layer.apart for layer in value_layers(again))


def test_prefixes_are_stored_and_loaded(model):
    logits = []
    with MemoryStore() as store:
        for _ in range(3):
            cache = CompressedCache(model, "int:bits=8", k_eq_v=True)
            prefixes = prefix_cache(store, model, cache, fingerprint="x", chunk=64)
            assert prefixes.prefill(IDS[:1, :200]) == 192
            assert not any(layer.apart for layer in value_layers(cache))
            logits.append(run(model, cache, IDS[:1, 192:220], 192, (28,)))
    computed, loaded, again = logits
    assert torch.equal(loaded, again)
    assert (loaded - computed).abs().max() <= 0.02 * computed.abs().max()


def test_rows_tokens_and_copies_go_with_their_positions(model):
    cache, mask = CompressedCache(model, "turboquant:bits=4", k_eq_v=True), torch.ones_like(IDS)
    mask[0, :9] = 0
    places = (mask.cumsum(1) - 1).clamp(min=0)

    def go_on(held, rows, start, end):
        given = {"attention_mask": mask[rows, :end], "position_ids": places[rows, start:end]}
        with torch.no_grad():
            return model(IDS[rows, start:end], **given, **named(held)).logits

    both, last = [0, 1], [1, 1]
    go_on(cache, both, 0, 150), go_on(cache, both, 150, 200)
    twin = copy.deepcopy(cache)
    cache.crop(-60)
    cache.batch_select_indices(torch.tensor([1]))
    cache.batch_repeat_interleave(2)
    cache.reorder_cache(torch.tensor([1, 0]))
    assert torch.equal(value_layers(cache)[0].positions.long(), places[last, :140])
    data = cache.snapshot().to_bytes()
    again = CompressedCache(model, "turboquant:bits=4", k_eq_v=True)
    again.restore(Snapshot.from_bytes(data))
    got = go_on(cache, last, 140, 150)
    assert torch.equal(go_on(again, last, 140, 150), got) and torch.equal(got[0], got[1])
    twin.crop(-60)
    assert torch.allclose(go_on(twin, both, 140, 150)[1], got[0], atol=1e-4)
    cache.crop(-150)
    assert value_layers(cache)[0].positions is None


def test_windows_may_be_packed_beside_values():
    model = made(torch.float32, "sliding", "full", "sliding", "full")
    given = {"k_eq_v": True, "sliding": "int:bits=8,window=4"}
    cache, exact = CompressedCache(model, "int:bits=8", **given), DynamicCache(config=model.config)
    wanted, got = (run(model, x, IDS[:, :200], sizes=(150, 1, 49)) for x in (exact, cache))
    assert (got - wanted).abs().max() <= 0.05 * wanted.abs().max()
    again = CompressedCache(model, "int:bits=8", **given)
    again.restore(Snapshot.from_bytes(cache.snapshot().to_bytes()))
    one, other = (run(model, x, IDS[:, 200:210], 200, (10,)) for x in (cache, again))
    assert torch.equal(one, other) and value_layers(again)


def test_generate_makes_such_caches_once_enabled(model):
    twin = copy.deepcopy(model)
    cache = CompressedCache(model, "none", k_eq_v=True)
    wanted = model.generate(IDS[:, :100], **GREEDY, **named(cache))
    with enable(twin, "none", k_eq_v=True):
        result = twin.generate(IDS[:, :100], **GREEDY, return_dict_in_generate=True)
    assert torch.equal(result.sequences, wanted) and value_layers(cache_of(result))


def test_what_makes_no_keys_of_values_is_refused_by_name(model):
    with pytest.raises(SpecError, match="give the model, no config"):
        CompressedCache(model.config, "none", k_eq_v=True)
    with pytest.raises(SpecError, match="True or False"):
        CompressedCache(model, "none", k_eq_v="yes")
    with pytest.raises(BackendUnavailable, match="use 'auto'"):
        CompressedCache(model, "none", k_eq_v=True, backend="cpu")
    other = AutoModelForCausalLM.from_config(LlamaConfig(**SIZES))
    with pytest.raises(SpecError, match="no layer of this model makes keys of its values"):
        CompressedCache(other, "none", k_eq_v=True)
    cache = CompressedCache(model, "none", k_eq_v=True)
    run(model, cache, IDS[:, :10], sizes=(10,))
    with pytest.raises(GeometryError, match="batch 1, but the cache holds 2"):
        run(model, cache, IDS[:1, 10:12], 10, (2,))


def test_a_tower_for_images_has_a_rope_of_its_own():
    text = gemma4_k_eq_v(SIZES, "sliding", "full", "full").to_dict()
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "head_dim": 16}
    tower = transformers.Gemma4VisionConfig(**sizes, num_attention_heads=2, num_key_value_heads=2)
    parts = {"text_config": text, "vision_config": tower.to_dict(), "audio_config": None}
    torch.manual_seed(0)
    kind = transformers.Gemma4ForConditionalGeneration
    model = kind._from_config(transformers.Gemma4Config(**parts), attn_implementation="sdpa").eval()
    cache = CompressedCache(model, "none", k_eq_v=True)
    both = (DynamicCache(config=model.config), cache)
    wanted, got = (run(model, x, IDS[:, :60], sizes=(30, 1, 29)) for x in both)
    assert torch.equal(got, wanted) and not any(layer.apart for layer in value_layers(cache))


def test_sizes_count_values_alone():
    """Gemma 4's default sizes: 5 full layers of 4 heads, 512 wide, in bf16."""
    config = transformers.Gemma4TextConfig(attention_k_eq_v=True)
    if not hasattr(config, "per_layer_config"):
        pytest.skip("this transformers has no default heads of full layers")
    given = (config, ["none", "turboquant:bits=4"], 4096)
    apart, alone = (kvpact.size(*given, dtype="bfloat16", k_eq_v=x) for x in (False, True))
    assert apart.rows[0].compressed == 40_960 * 4096 and alone.rows[0].compressed == 20_480 * 4096
    assert apart.rows[1].compressed == 2 * alone.rows[1].compressed
    assert [x.exact for x in apart.rows] == [x.exact for x in alone.rows]
    assert [x.own for x in apart.rows] == [x.own for x in alone.rows]
    with pytest.raises(SpecError, match="no layer of this model makes keys"):
        kvpact.size(LlamaConfig(**SIZES), k_eq_v=True)
    name = "gemma-4-31b-it"
    config = AutoConfig.for_model(**model_table()["models"][name]["config"])
    known, named = (kvpact.size(x, "trellis:bits=4", 4096, k_eq_v=True) for x in (name, config))
    assert known.rows == named.rows
