"""Ways in which transformers uses a cache, each compared with `DynamicCache` or refused by name."""

import copy
import gc
import io
import pickle

import pytest
import torch
from tiny_configs import falcon_h1
from transformers import AttentionInterface, DynamicCache, FalconConfig, Zamba2Config
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from kvpact import CacheGeometry, PagedKVCache, create_cache
from kvpact.errors import GeometryError, KVPactError, SnapshotError
from kvpact.integrations.transformers import CompressedCache, register_attention
from kvpact.integrations.transformers.graphs import DecodeGraph
from kvpact.integrations.transformers.versions import named

HYBRID = {
    "falcon_h1": falcon_h1,
    "zamba2": lambda s: Zamba2Config(
        **{**s, "num_hidden_layers": 3, "num_key_value_heads": 4},
        layers_block_type=["mamba", "hybrid", "hybrid"], mamba_d_state=8, n_mamba_heads=4,
        mamba_ngroups=1, chunk_size=8, num_mem_blocks=1, adapter_rank=8,
    ),
}  # fmt: skip


def falcon(**options):
    return FalconConfig(
        hidden_size=64, num_hidden_layers=2, num_attention_heads=4, vocab_size=128, **options
    )


@pytest.mark.parametrize("alibi", [False, True])
def test_falcon_stays_causal_now_and_for_later_caches(alibi, make_model, prompt, fallbacks):
    """Its module asks for "sdpa" by name, and otherwise takes the mask for a number to add."""
    model, mask = make_model(falcon(alibi=alibi)), prompt["attention_mask"]

    @torch.no_grad()
    def run(held):
        parts = enumerate(prompt["input_ids"].split(8, dim=1), 1)
        masks = [(ids, {"attention_mask": mask[:, : 8 * end]}) for end, ids in parts]
        steps = [model(ids, **more, **named(held)).logits for ids, more in masks]
        return torch.cat(steps, dim=1)[mask == 1]

    wanted = run(DynamicCache(config=model.config))
    got, said = fallbacks(lambda: run(CompressedCache(model.config, "none")))
    assert len(said) == 1 and "by itself: K and V are decompressed" in said[0]
    assert torch.allclose(got, wanted, atol=1e-4, rtol=1e-4)
    assert torch.equal(run(DynamicCache(config=model.config)), wanted)


def test_a_model_that_asks_for_sdpa_by_name_can_not_be_given_kvpact():
    register_attention()
    config = falcon()
    config._attn_implementation = "kvpact"
    with pytest.raises(KVPactError, match="load it with attention 'sdpa'"):
        CompressedCache(config, "none")


@pytest.mark.parametrize("attention", ["eager", "sdpa", "kvpact", "auto"])
def test_gradients_are_refused_whatever_reads_k_and_v(attention, llama, prompt):
    register_attention()
    if attention != "auto":
        llama.set_attn_implementation(attention)
    attention = "auto" if attention == "auto" else "keep"
    cache = CompressedCache(llama.config, "int:bits=8", attention=attention)
    loss = llama(**prompt, **named(cache)).logits.sum()
    with pytest.raises(KVPactError, match="no gradients"):
        loss.backward()


def test_gradients_that_do_not_pass_the_cache_are_right(llama, prompt):
    llama.set_attn_implementation("eager")
    gradients = []
    for parameter in llama.model.parameters():
        parameter.requires_grad_(False)
    for cache in (DynamicCache(), CompressedCache(llama.config, "none", attention="keep")):
        llama.lm_head.weight.grad = None
        llama(**prompt, **named(cache)).logits.sum().backward()
        gradients.append(llama.lm_head.weight.grad)
    assert torch.allclose(*gradients, atol=1e-4)


def test_flex_attention_reads_decompressed_tensors(llama, prompt, fallbacks, monkeypatch):
    """What compiles its inputs is handed plain tensors: a handle can't be traced."""
    seen = []

    def flex(module, query, key, value, attention_mask, **kwargs):
        seen.extend([type(key), type(value)])
        return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)

    wanted = llama(**prompt).logits[prompt["attention_mask"] == 1]
    monkeypatch.setitem(AttentionInterface._global_mapping, "flex_attention", flex)
    monkeypatch.setitem(AttentionMaskInterface._global_mapping, "flex_attention", sdpa_mask)
    llama.config._attn_implementation = "flex_attention"
    cache, said = fallbacks(lambda: CompressedCache(llama.config, "none"))
    with torch.no_grad():
        got = llama(**prompt, **named(cache)).logits[prompt["attention_mask"] == 1]
        llama(prompt["input_ids"][:, :1], **named(cache))
    assert "decompressed" in said[0] and seen == 8 * [torch.Tensor]
    assert torch.allclose(got, wanted, atol=1e-4)
    loss = llama(**prompt, **named(CompressedCache(llama.config, "none"))).logits.sum()
    with pytest.raises(KVPactError, match="no gradients"):
        loss.backward()


def test_prefix_tuning_is_told_what_to_do(llama):
    """PEFT asks an empty cache for `max_cache_len`, and puts its own cache in its place."""
    cache = CompressedCache(llama.config, "none")
    with pytest.raises(KVPactError, match="prefix tuning"):
        _ = cache.max_cache_len
    assert not hasattr(cache, "max_cache_len")


@pytest.mark.parametrize("attention", ["kvpact", "sdpa"])
def test_autocast_runs(attention, llama, prompt, greedy):
    """RoPE makes K fp32 while V stays bf16."""
    llama.set_attn_implementation("sdpa")
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        wanted = llama(**prompt, **named(DynamicCache(config=llama.config))).logits
        register_attention()
        llama.set_attn_implementation(attention)
        cache = CompressedCache(llama.config, "none", attention="keep")
        got = llama(**prompt, **named(cache)).logits
        assert cache.layers[0].keys.dtype is torch.float32
        more = llama(prompt["input_ids"][:, :1], **named(cache)).logits
    assert got.dtype is wanted.dtype
    assert more.isfinite().all()
    seen = prompt["attention_mask"] == 1
    error = (got - wanted)[seen].float().norm() / wanted[seen].float().norm()
    assert error < 0.03
    cache.reset()
    assert llama.generate(**prompt, **greedy, **named(cache)).shape[0] == 2


@pytest.mark.parametrize("attention", ["kvpact", "sdpa", "eager"])
def test_float64_runs_and_is_stored_in_fp32(attention, llama, prompt, fallbacks):
    prompt = {
        "input_ids": prompt["input_ids"][1:]
    }  # padding and attention "eager" in float64 give NaN without kvpact
    llama.double().set_attn_implementation("sdpa")
    with torch.no_grad():
        wanted = llama(**prompt, **named(DynamicCache(config=llama.config))).logits
        register_attention()
        llama.set_attn_implementation(attention)
        cache = CompressedCache(llama.config, "none", attention="keep")
        got, said = fallbacks(lambda: llama(**prompt, **named(cache)).logits)
        llama(prompt["input_ids"][:, :1], **named(cache))
    assert got.dtype is torch.float64
    assert cache.layers[0].keys.dtype is torch.float32
    assert [text for text in said if "float64" in text]
    assert torch.allclose(got, wanted, atol=1e-4)


def test_pickling_says_what_to_do_instead(llama, prompt):
    empty, used = (CompressedCache(llama.config, "turboquant:bits=4") for _ in range(2))
    with torch.no_grad():
        llama(**prompt, **named(used))
    for save in (pickle.dumps, lambda cache: torch.save(cache, io.BytesIO()), copy.copy):
        for cache in (empty, used):
            with pytest.raises(SnapshotError, match=r"snapshot\(\)"):
                save(cache)
    twin = copy.deepcopy(used)
    assert torch.equal(twin.layers[0].keys, used.layers[0].keys)


def test_pickling_a_bare_cache_says_what_to_do_instead():
    cache = create_cache("int:bits=8", CacheGeometry(1, 1, 16))
    x = torch.ones(1, 1, 3, 16)
    cache.attend(0, k=x, v=x, q=x)
    with pytest.raises(SnapshotError, match=r"snapshot\(\)"):
        pickle.dumps(cache)
    assert copy.deepcopy(cache).seq_len() == 3


@pytest.mark.parametrize("save", [pickle.dumps, copy.copy, copy.deepcopy])
def test_pickling_or_copying_a_paged_cache_says_what_to_do_instead(save):
    cache = PagedKVCache("int:bits=8", CacheGeometry(1, 1, 16), num_pages=1)
    with pytest.raises(SnapshotError, match=r"snapshot\(seqs\).*fork\(seq\)"):
        save(cache)


def test_a_model_gets_its_attention_back_when_its_caches_are_gone(llama):
    """`generate_batch` and whatever else asks for "sdpa" by name works again."""
    CompressedCache(llama.config, "none", attention="keep")
    assert llama.config._attn_implementation == "sdpa"
    one, two = CompressedCache(llama.config, "none"), CompressedCache(llama.config, "none")
    assert llama.config._attn_implementation == "kvpact"
    three = copy.deepcopy(two)
    del one, two
    gc.collect()
    assert llama.config._attn_implementation == "kvpact"
    del three
    gc.collect()
    assert llama.config._attn_implementation == "sdpa"


def test_an_attention_that_was_asked_for_stays(llama):
    register_attention()
    llama.set_attn_implementation("kvpact")
    cache = CompressedCache(llama.config, "none")
    del cache
    gc.collect()
    assert llama.config._attn_implementation == "kvpact"


@pytest.mark.parametrize("name", HYBRID)
def test_layers_with_a_state_and_full_attention_are_compressed(
    name, make_model, sizes, prompt, greedy
):
    model = make_model(HYBRID[name](sizes))
    wanted = model.generate(**prompt, **greedy, **named(DynamicCache(config=model.config)))
    cache = CompressedCache(model.config, "none")
    assert torch.equal(model.generate(**prompt, **greedy, **named(cache)), wanted)
    assert cache.stats()["layers"] == {"compressed": 2, "native": len(cache.layers) - 2}
    with pytest.raises(KVPactError, match="whose steps no graph of kvpact has"):
        DecodeGraph(model, cache)
    twin = copy.deepcopy(cache)
    for held in (cache, twin):
        more = model.generate(wanted, **{**greedy, "max_new_tokens": 3}, **named(held))
        assert more.shape[1] == wanted.shape[1] + 3
    cache.reset()
    again = model.generate(**prompt, **greedy, **named(cache))
    assert torch.equal(again, wanted)


def test_beams_reorder_state_and_slots_together(make_model, sizes, prompt, greedy):
    model = make_model(HYBRID["falcon_h1"](sizes))
    options = {**greedy, "max_new_tokens": 8, "num_beams": 3}
    wanted = model.generate(**prompt, **options, **named(DynamicCache(config=model.config)))
    got = model.generate(**prompt, **options, **named(CompressedCache(model.config, "none")))
    assert torch.equal(got, wanted)


def test_layers_of_unlike_shapes_have_caches_of_their_own(llama):
    cache = CompressedCache(llama.config, "int:bits=8")
    one, two = torch.ones(1, 2, 5, 16), torch.ones(1, 1, 5, 32)
    for layer, x in zip(cache.layers, (one, two), strict=True):
        layer.update(x, x)
    assert [tuple(layer.keys.shape) for layer in cache.layers] == [(1, 2, 5, 16), (1, 1, 5, 32)]
    cache.crop(-2)
    assert [cache.get_seq_length(i) for i in range(2)] == [3, 3]
    assert cache.stats()["values"] == 2 * 3 * (32 + 32)
    with pytest.raises(GeometryError, match="unlike shapes"):
        cache.snapshot()
    twin = copy.deepcopy(cache)
    cache.reset()
    assert [twin.get_seq_length(i) for i in range(2)] == [3, 3]
    assert cache.memory_usage() == 0
