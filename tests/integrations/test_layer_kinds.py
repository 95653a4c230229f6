"""Models with layers of several kinds, as `DynamicCache` runs them."""

import copy

import pytest
import torch
from closeness import WHOLE_BOUND, error
from tiny_configs import (
    KINDS,
    WINDOW,
    DeepseekV4Config,
    Gemma4TextConfig,
    dots3,
    gemma4_k_eq_v,
    run,
)
from transformers import DynamicCache, Gemma3nTextConfig, LlamaConfig

from kvpact.errors import GeometryError
from kvpact.integrations.transformers import CompressedCache, calibrate, register_attention
from kvpact.integrations.transformers.layers.full import CompressedLayer
from kvpact.integrations.transformers.layers.shapes import layer_shapes
from kvpact.integrations.transformers.versions import named
from kvpact.spec import parse_spec

every_model = pytest.mark.parametrize("name", KINDS)


@every_model
def test_turns_of_several_tokens_behind_the_window(name, make_model, sizes, ids):
    """Inkling crashed: masks of full attention had the sizes of a layer with a window."""
    model = make_model(KINDS[name](sizes))
    parts = ids.split([WINDOW + 9, 1, 5, 1, 28], dim=1)
    wanted = run(model, DynamicCache(config=model.config), parts)
    got = run(model, CompressedCache(model, "none"), parts)
    assert torch.allclose(got, wanted, atol=1e-3)


def test_a_window_does_not_keep_a_whole_prompt(make_model, sizes, ids):
    """transformers' own is a view of all of the prompt's K or V."""
    model = make_model(KINDS["gemma3"](sizes))
    cache, exact = CompressedCache(model, "none"), DynamicCache(config=model.config)
    for one in (cache, exact):
        run(model, one, [ids])
    for name in ("keys", "values"):
        held = getattr(cache.layers[0], name)
        assert torch.equal(held, getattr(exact.layers[0], name))
        assert held.shape[2] == WINDOW - 1
        assert held.untyped_storage().nbytes() == held.nbytes
    steps = [run(model, one, [ids[:, :1]]) for one in (cache, exact)]
    assert torch.allclose(*steps, atol=1e-5)


def test_widths_of_latents_are_read_layer_by_layer(make_model, sizes, ids):
    model = make_model(dots3(sizes))
    cache = CompressedCache(model, "none")
    run(model, cache, ids.split(20, dim=1))
    assert cache.stats()["layers"] == {"compressed": 2, "native": 1}
    geometry = cache.layers[0].cache.geometry
    assert (geometry.latent, geometry.head_dim, geometry.v_head_dim) == (True, 32, 16)
    shapes = layer_shapes(model.config, torch.float32)
    assert all(shape.latent for shape in shapes)
    assert [shape.key_dim for shape in shapes] == [32, 48, 32]


def test_a_model_whose_layers_have_unlike_heads_is_calibrated(make_model, sizes):
    """Gemma 4's config has no number of KV heads for all layers: reading it raises."""
    own = {"num_kv_shared_layers": 0, "hidden_size_per_layer_input": 0}
    model = make_model(gemma4_k_eq_v(sizes, "sliding", "full", num_global_key_value_heads=1, **own))
    texts = [torch.randint(3, 128, (160,), generator=torch.Generator().manual_seed(6))]
    known = calibrate(model, texts, [parse_spec("pca:bits=2")])
    assert sorted(known.layers) == [1]


def held_decompressed(model, cache):
    """Return a cache of transformers' that holds what a compressed one does."""
    other = DynamicCache(config=model.config)
    if not other.layers:
        pytest.skip("this transformers has a cache of no layers where none share K and V")
    for index, layer in enumerate(cache.layers):
        if not isinstance(layer, CompressedLayer):
            other.layers[index] = copy.deepcopy(layer)
        elif layer.keys is not None:
            other.layers[index].update(layer.keys, layer.values)
    return other


SHARING = {
    "gemma3n": lambda s, shared: Gemma3nTextConfig(
        **{**s, "num_hidden_layers": 5}, vocab_size_per_layer_input=128,
        hidden_size_per_layer_input=16, head_dim=16, sliding_window=WINDOW,
        layer_types=["full_attention", "sliding_attention", *["full_attention"] * 3],
        num_kv_shared_layers=shared, laurel_rank=8, altup_num_inputs=2,
        activation_sparsity_pattern=[0.0] * 5,
    ),
    "gemma4": lambda s, shared: Gemma4TextConfig(
        **{**s, "num_hidden_layers": 4}, head_dim=16, global_head_dim=32,
        sliding_window=WINDOW, layer_types=["sliding_attention", *["full_attention"] * 3],
        num_kv_shared_layers=shared, hidden_size_per_layer_input=16,
        vocab_size_per_layer_input=128,
    ),
}  # fmt: skip


@pytest.mark.parametrize("attention", ["kvpact", "eager"])
@pytest.mark.parametrize(("name", "shared"), [("gemma3n", 2), ("gemma4", 2), ("gemma4", 0)])
def test_layers_that_share_k_and_v_see_the_same_past(name, shared, attention, make_model, sizes):
    """Later layers saw it without what the new tokens had pushed out of the window."""
    register_attention()
    model = make_model(SHARING[name](sizes, shared), attention)
    ids = torch.randint(3, 128, (1, 60), generator=torch.Generator().manual_seed(5))
    cache = CompressedCache(model, "int:bits=4,sinks=3,window=7", attention="keep")
    for part in ids.split([30, 10, 1, 1, 12, 6], dim=1):
        other = held_decompressed(model, cache)
        got = run(model, cache, [part])
        model.set_attn_implementation("eager")
        assert error(run(model, other, [part]), got) <= WHOLE_BOUND
        model.set_attn_implementation(attention)


@pytest.mark.parametrize(("tokens", "keep"), [(WINDOW - 4, 3), (3 * WINDOW, 1), (3 * WINDOW, 3)])
def test_layers_that_share_k_and_v_may_leave_out_queries(keep, tokens, make_model, sizes, ids):
    """Those left were taken for the first ones, with any cache while 'kvpact' was lent."""
    model = make_model(SHARING["gemma4"](sizes, 2))
    ids = ids[:, :tokens]
    with torch.no_grad():
        wanted = model(ids).logits[:, -keep:]
        mine = CompressedCache(model, "none")
        for cache in (mine, DynamicCache(config=model.config)):
            got = model(ids, **named(cache), logits_to_keep=keep).logits
            assert torch.allclose(got, wanted, atol=1e-4)


def test_a_refused_mask_stores_nothing_where_k_and_v_are_shared(make_model, sizes, ids):
    model = make_model(SHARING["gemma4"](sizes, 2))
    cache = CompressedCache(model, "int:bits=4,sinks=3,window=7")
    run(model, cache, [ids[:, :20]])
    before = cache.layers[1].keys
    wrong = torch.ones(3, 1, 9, 31, dtype=torch.bool).tril(20)
    masks = {"full_attention": wrong, "sliding_attention": None}
    with pytest.raises(GeometryError, match="mask"), torch.no_grad():
        model(ids[:, 20:29], attention_mask=masks, **named(cache))
    assert torch.equal(cache.layers[1].keys, before)


@every_model
def test_rows_are_those_of_a_batch_made_of_them(name, make_model, sizes, ids):
    """transformers' layers with a state have no such call; with both, K and V alone followed."""
    model = make_model(KINDS[name](sizes))
    parts, steps = [ids[:, :40], ids[:, 40:41]], ids[:, 41:46].split(1, dim=1)
    wanted = run(model, DynamicCache(config=model.config), [*parts, *steps])[:, 41:]
    cache = CompressedCache(model, "none")
    run(model, cache, parts)
    for rows, change in (
        ([2, 0], lambda cache: cache.batch_select_indices(torch.tensor([2, 0]))),
        ([0, 2], lambda cache: cache.batch_select_indices(torch.tensor([True, False, True]))),
        ([0, 0, 1, 1, 2, 2], lambda cache: cache.batch_repeat_interleave(2)),
    ):
        changed = copy.deepcopy(cache)
        change(changed)
        got = run(model, changed, [step[rows] for step in steps])
        assert torch.allclose(got, wanted[rows], atol=1e-3)


@pytest.mark.parametrize("name", ["qwen3_next", "falcon_h1"])
def test_rows_that_are_not_there_change_nothing(name, filled, ids):
    model, cache = filled(name, 9)
    twin = copy.deepcopy(cache)
    with pytest.raises(GeometryError, match=r"0 ... 2"):
        cache.batch_select_indices(torch.tensor([3]))
    with pytest.raises(GeometryError, match="from 1 on"):
        cache.batch_repeat_interleave(0)
    assert torch.equal(*(run(model, x, [ids[:, 9:12]]) for x in (cache, twin)))


def test_kinds_of_layers_that_a_model_s_file_brings_are_known_from_its_config(sizes):
    """Where only the config was imported, transformers does not know them yet."""
    cache = CompressedCache(DeepseekV4Config(**sizes), "none")
    assert "CompressedDeepseekV4HCACache" in map(repr, cache.layers)


def test_a_config_that_changes_is_read_again(sizes):
    config = LlamaConfig(**sizes)
    assert len(CompressedCache(config, "none").layers) == 2
    config.num_hidden_layers = 3
    assert len(CompressedCache(config, "none").layers) == 3
