"""Models with layers of several kinds, as `DynamicCache` runs them."""

import copy

import pytest
import torch
from closeness import WHOLE_BOUND, error
from tiny_configs import falcon_h1, gemma3, lfm2
from transformers import (
    DynamicCache,
    Gemma3nTextConfig,
    Gemma4TextConfig,
    InklingTextConfig,
    LlamaConfig,
    Qwen3NextConfig,
)
from transformers.cache_utils import DynamicSlidingWindowLayer
from transformers.models.dots3_note import Dots3NoteTextConfig

from kvpact.errors import GeometryError, KVPactError
from kvpact.integrations.transformers import CompressedCache, calibrate, register_attention
from kvpact.integrations.transformers.layer import CompressedLayer
from kvpact.integrations.transformers.records import attributes_of
from kvpact.integrations.transformers.shapes import layer_shapes
from kvpact.spec import parse_spec

WINDOW = 16


def inkling(sizes):
    return InklingTextConfig(
        **sizes,
        head_dim=16,
        swa_num_attention_heads=4,
        swa_num_key_value_heads=2,
        swa_head_dim=16,
        sliding_window_size=WINDOW,
        d_rel=8,
        rel_extent=64,
        layer_types=["hybrid_sliding", "hybrid"],
        mlp_layer_types=["dense", "dense"],
        logits_mup_width_multiplier=1.0,
    )


def dots3(sizes):
    latent = {"q_lora_rank": 16, "head_dim": 32, "qk_nope_head_dim": 16, "v_head_dim": 16}
    return Dots3NoteTextConfig(
        **{**sizes, "num_key_value_heads": 4, "num_hidden_layers": 3},
        **latent,
        **{f"swa_{name}": value for name, value in latent.items()},
        kv_lora_rank=32,
        swa_kv_lora_rank=48,
        swa_num_attention_heads=4,
        swa_num_key_value_heads=4,
        qk_rope_head_dim=16,
        moe_intermediate_size=32,
        shared_experts_intermediate_size=32,
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_shared_experts=1,
        sliding_window=WINDOW,
        layer_types=["full_attention", "sliding_attention", "full_attention"],
        use_dsa=False,
    )


def qwen3_next(sizes):
    return Qwen3NextConfig(
        **sizes,
        head_dim=16,
        layer_types=["linear_attention", "full_attention"],
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=16,
        linear_value_head_dim=16,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        shared_expert_intermediate_size=32,
    )


MODELS = {
    "inkling": inkling,
    "dots3": dots3,
    "qwen3_next": qwen3_next,
    "lfm2_conv": lfm2,
    "falcon_h1": falcon_h1,
    "gemma3": lambda s: gemma3(s, "sliding", "full"),
}
every_model = pytest.mark.parametrize("name", MODELS)


@pytest.fixture
def ids():
    return torch.randint(3, 128, (3, 60), generator=torch.Generator().manual_seed(5))


def run(model, cache, parts):
    with torch.no_grad():
        steps = [model(part, past_key_values=cache, use_cache=True).logits for part in parts]
    return torch.cat(steps, dim=1)


@every_model
def test_turns_of_several_tokens_behind_the_window(name, make_model, sizes, ids):
    """Inkling crashed: masks of full attention had the sizes of a layer with a window."""
    model = make_model(MODELS[name](sizes))
    parts = ids.split([WINDOW + 9, 1, 5, 1, 28], dim=1)
    wanted = run(model, DynamicCache(config=model.config), parts)
    got = run(model, CompressedCache(model, "none"), parts)
    assert torch.allclose(got, wanted, atol=1e-3)


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
    config = Gemma4TextConfig(
        **sizes,
        head_dim=16,
        global_head_dim=32,
        attention_k_eq_v=True,
        num_global_key_value_heads=1,
        sliding_window=WINDOW,
        layer_types=["sliding_attention", "full_attention"],
        hidden_size_per_layer_input=0,
        vocab_size_per_layer_input=128,
    )
    model = make_model(config)
    texts = [torch.randint(3, 128, (160,), generator=torch.Generator().manual_seed(6))]
    known = calibrate(model, texts, [parse_spec("pca:bits=2")])
    assert sorted(known.layers) == [1]


def held_decompressed(model, cache):
    """Return a cache of transformers' that holds what a compressed one does."""
    other = DynamicCache(config=model.config)
    for index, layer in enumerate(cache.layers):
        if not isinstance(layer, CompressedLayer):
            other.layers[index] = copy.deepcopy(layer)
        elif layer.keys is not None:
            other.layers[index].update(layer.keys, layer.values)
    return other


SHARING = {
    "gemma3n": lambda s, shared: Gemma3nTextConfig(
        **{**s, "num_hidden_layers": 5},
        vocab_size_per_layer_input=128,
        hidden_size_per_layer_input=16,
        head_dim=16,
        sliding_window=WINDOW,
        layer_types=["full_attention", "sliding_attention", *["full_attention"] * 3],
        num_kv_shared_layers=shared,
        laurel_rank=8,
        altup_num_inputs=2,
        activation_sparsity_pattern=[0.0] * 5,
    ),
    "gemma4": lambda s, shared: Gemma4TextConfig(
        **{**s, "num_hidden_layers": 4},
        head_dim=16,
        global_head_dim=32,
        sliding_window=WINDOW,
        layer_types=["sliding_attention", *["full_attention"] * 3],
        num_kv_shared_layers=shared,
        hidden_size_per_layer_input=16,
        vocab_size_per_layer_input=128,
    ),
}


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
            got = model(ids, past_key_values=cache, logits_to_keep=keep).logits
            assert torch.allclose(got, wanted, atol=1e-4)


def test_a_refused_mask_stores_nothing_where_k_and_v_are_shared(make_model, sizes, ids):
    model = make_model(SHARING["gemma4"](sizes, 2))
    cache = CompressedCache(model, "int:bits=4,sinks=3,window=7")
    run(model, cache, [ids[:, :20]])
    before = cache.layers[1].keys
    wrong = torch.ones(3, 1, 9, 31, dtype=torch.bool).tril(20)
    masks = {"full_attention": wrong, "sliding_attention": None}
    with pytest.raises(GeometryError, match="mask"), torch.no_grad():
        model(ids[:, 20:29], attention_mask=masks, past_key_values=cache)
    assert torch.equal(cache.layers[1].keys, before)


@every_model
def test_rows_are_those_of_a_batch_made_of_them(name, make_model, sizes, ids):
    """transformers' layers with a state have no such call; with both, K and V alone followed."""
    model = make_model(MODELS[name](sizes))
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
def test_rows_that_are_not_there_change_nothing(name, make_model, sizes, ids):
    model = make_model(MODELS[name](sizes))
    cache = CompressedCache(model, "none")
    run(model, cache, [ids[:, :9]])
    twin = copy.deepcopy(cache)
    with pytest.raises(GeometryError, match=r"0 … 2"):
        cache.batch_select_indices(torch.tensor([3]))
    with pytest.raises(GeometryError, match="from 1 on"):
        cache.batch_repeat_interleave(0)
    assert torch.equal(*(run(model, x, [ids[:, 9:12]]) for x in (cache, twin)))


def test_kinds_of_layers_that_a_model_s_file_brings_are_known_from_its_config(sizes):
    """Where only the config was imported, transformers does not know them yet."""
    from transformers import DeepseekV4Config

    with pytest.raises(KVPactError, match="streams that the model compresses itself"):
        CompressedCache(DeepseekV4Config(**sizes), "none")


def test_a_config_that_changes_is_read_again(sizes):
    config = LlamaConfig(**sizes)
    assert len(CompressedCache(config, "none").layers) == 2
    config.num_hidden_layers = 3
    assert len(CompressedCache(config, "none").layers) == 3


def test_a_layer_that_is_not_known_is_refused_by_name():
    class NewLayer(DynamicSlidingWindowLayer):
        pass

    with pytest.raises(KVPactError, match="what transformers' NewLayer holds"):
        attributes_of(NewLayer(8))


def test_a_tensor_that_is_not_known_is_refused_by_name(make_model, sizes, ids):
    model = make_model(qwen3_next(sizes))
    cache = CompressedCache(model, "none")
    run(model, cache, [ids[:, :9]])
    cache.layers[0].gates = torch.zeros(3, 2)
    with pytest.raises(KVPactError, match="LinearAttentionLayer holds 'gates'"):
        cache.batch_select_indices(torch.tensor([0]))
    assert cache.layers[0].recurrent_states[0].shape[0] == 3


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("qwen3_next", "linear attention stands for all"),
        ("lfm2_conv", "a convolution has the last"),
        ("falcon_h1", "linear attention stands for all"),
        ("gemma3", "before the window of 16"),
        ("inkling", "a convolution has the last"),
    ],
)
def test_a_rollback_that_is_not_possible_changes_no_layer(name, why, make_model, sizes, ids):
    model = make_model(MODELS[name](sizes))
    cache = CompressedCache(model, "none")
    run(model, cache, [ids[:, :20]])
    twin = copy.deepcopy(cache)
    with pytest.raises(KVPactError, match=why):
        cache.crop(-2)
    cache.crop(0)
    assert torch.equal(*(run(model, x, [ids[:, 20:23]]) for x in (cache, twin)))


@every_model
def test_after_a_reset_a_cache_takes_a_batch_of_another_size(name, make_model, sizes, ids):
    model = make_model(MODELS[name](sizes))
    cache, new = CompressedCache(model, "none"), CompressedCache(model, "none")
    run(model, cache, [ids[:, :20]])
    cache.reset()
    parts = ids[:2].split([20, 1, 39], dim=1)
    assert torch.equal(*(run(model, x, parts) for x in (cache, new)))
