"""`CompressedCache` as transformers' `Cache`: state, bookkeeping, fallbacks, bytes."""

import copy
import weakref
from functools import partial
from pathlib import Path

import pytest
import torch
from families import crop_nothing
from tiny_configs import without_collector
from transformers import BloomConfig, BloomForCausalLM, DynamicCache, LlamaConfig

from kvpact import FallbackWarning
from kvpact.errors import GeometryError, KVPactError, LayerIndexError, NonFiniteError
from kvpact.integrations.transformers import CompressedCache, versions
from kvpact.integrations.transformers.attention.forward import attention_forward
from kvpact.integrations.transformers.versions import named
from kvpact.testing import held_bytes

pytestmark = pytest.mark.usefixtures("no_grad")


def prefilled(model, prompt, spec="turboquant:bits=4", **options):
    cache = CompressedCache(model.config, spec, **options)
    model(**prompt, **named(cache))
    return cache


def inner(cache, layer=0):
    return cache.held().entry(layer)


def test_padding_longer_than_the_first_chunk(llama, prompt):
    """With chunks of 4, the first row's first chunk is nothing but padding."""
    ids, mask = prompt["input_ids"], prompt["attention_mask"]
    cache, exact = CompressedCache(llama.config, "int:bits=4,sinks=3,window=0"), DynamicCache()
    for start in range(0, 40, 4):
        end = start + 4
        positions = (mask.cumsum(1) - 1).clamp(min=0)[:, start:end]
        for held in (cache, exact):
            places = {"position_ids": positions, "attention_mask": mask[:, :end]}
            llama(input_ids=ids[:, start:end], **places, **named(held))
    sinks = inner(cache).k.sinks
    assert torch.equal(sinks[0], exact.layers[0].keys[0, :, 7:10])


def test_mask_sizes_and_lengths(llama, prompt):
    cache = prefilled(llama, prompt)
    layer = cache.layers[0]
    sizes = layer.get_seq_length(), layer.get_mask_sizes(5), layer.get_max_length()
    assert sizes == (40, (45, 0), -1)
    assert (getattr(cache, "batch_size", 2), cache.is_compileable) == (2, False)
    assert getattr(cache, "is_croppable", True)
    assert all(layer.is_initialized for layer in cache.layers)
    fresh = CompressedCache(llama.config, "none")
    assert not any(layer.is_initialized for layer in fresh.layers)


def test_tokens_count_before_they_are_attended(llama):
    """Between `update` and attention the tokens are waiting, and count already."""
    layer = CompressedCache(llama.config, "none").layers[0]
    k = torch.ones(1, 2, 3, 16)
    handle, _ = layer.update(k, k)
    assert layer.get_seq_length() == 3 and tuple(handle.shape) == (1, 2, 3, 16)
    layer.update(2 * k, 2 * k)
    assert layer.get_seq_length() == 6
    assert torch.equal(layer.keys, torch.cat([k, 2 * k], dim=2))


@pytest.mark.parametrize("spec", ["none", "turboquant:bits=3", "kivi:bits=2", "kvarn:bits=4"])
def test_crop(llama, prompt, spec):
    cache, short = CompressedCache(llama.config, spec), CompressedCache(llama.config, spec)
    llama(**prompt, **named(cache))
    llama(**{k: v[:, :33] for k, v in prompt.items()}, **named(short))
    crop_nothing(cache)
    assert cache.get_seq_length() == 40
    cache.crop(-7)
    assert cache.get_seq_length() == 33
    for got, wanted in zip(inner(cache).tensors(), inner(short).tensors(), strict=True):
        assert torch.equal(got, wanted)
    if versions.crops_to_length():
        cache.crop(5)
        assert cache.get_seq_length() == 5
        return
    with pytest.raises(ValueError, match="negative"):
        cache.crop(5)


def test_any_other_attention_reads_decompressed_k_and_v(llama, prompt, greedy, fallbacks):
    llama.set_attn_implementation("eager")
    cache = CompressedCache(llama.config, "none", attention="keep")
    slow, said = fallbacks(lambda: llama.generate(**prompt, **greedy, **named(cache)))
    assert llama.config._attn_implementation == "eager" and len(said) == 1
    llama.set_attn_implementation("kvpact")
    cache = CompressedCache(llama.config, "none")
    fused, said = fallbacks(lambda: llama.generate(**prompt, **greedy, **named(cache)))
    assert said == [] and torch.equal(slow, fused)


def test_fallbacks_are_told_once_a_model_at_the_line_that_called(make_model, sizes, prompt):
    models = [make_model(LlamaConfig(**sizes)) for _ in range(2)]
    with pytest.warns(FallbackWarning, match="set_attn_implementation") as told:
        for model in (*models, *models):
            model.set_attn_implementation("eager")
            model.generate(**prompt, max_new_tokens=2, **named(CompressedCache(model)))
    assert [Path(x.filename).name for x in told] == [Path(__file__).name] * 2


def test_attention_of_a_models_own_is_told_no_other_one(prompt):
    bloom = BloomForCausalLM(
        BloomConfig(n_layer=2, hidden_size=32, n_head=2, vocab_size=128)
    ).eval()
    with pytest.warns(FallbackWarning, match="computes attention by itself") as told:
        bloom(**prompt, **named(CompressedCache(bloom)))
    assert len(told) == 1


def test_attention_weights_come_from_eager_alone(llama, prompt, fallbacks):
    ask = partial(llama, **prompt, output_attentions=True)
    output, said = fallbacks(lambda: ask(**named(CompressedCache(llama, "int4", window=8))))
    assert not output.attentions and len(said) == 1 and "'eager') has them" in said[0]
    llama.set_attn_implementation("eager")
    output, said = fallbacks(lambda: ask(**named(CompressedCache(llama))))
    assert [x.shape[-1] for x in output.attentions] == [40] * 2 and "weights" not in str(said)


def test_fused_attention_never_materialises(llama, prompt, greedy, monkeypatch):
    from kvpact.integrations.transformers.held.handles import KVHandle

    def refuse(self):
        raise AssertionError("K or V was decompressed as a whole")

    monkeypatch.setattr(KVHandle, "materialize", refuse)
    cache = CompressedCache(llama.config, "turboquant:bits=4")
    assert llama.generate(**prompt, **greedy, **named(cache)).shape == (2, 52)


def test_handles_can_be_read_after_attention(llama):
    """A model may attend and then look at K: it sees all tokens, the new ones as given."""
    layer = CompressedCache(llama.config, "int:bits=4,sinks=0,window=0").layers[0]
    k = torch.randn(1, 2, 10, 16, generator=torch.Generator().manual_seed(0))
    for _ in range(2):
        handle, _ = layer.update(k, k)
        from kvpact.contract import AttendConfig

        handle.pending.attend(k.repeat(1, 2, 1, 1), AttendConfig())
    assert layer.get_seq_length() == 20
    assert torch.equal((handle + 0)[:, :, 10:], k)
    assert not torch.equal((handle + 0)[:, :, :10], k)


def test_exact_tokens_are_let_go_once_they_are_stored(llama):
    """After a forward nothing but the cache's own tensors is alive, and `stats` counts those."""
    ids = torch.randint(3, 128, (1, 300), generator=torch.Generator().manual_seed(1))
    for attention in ("kvpact", "sdpa"):
        llama.set_attn_implementation(attention)
        cache = CompressedCache(llama.config, "turboquant:bits=4", attention="keep")
        llama(ids, **named(cache))
        assert cache._shared.waiting == [None, None]
        assert cache.memory_usage() == held_bytes(cache._shared)


def test_a_mask_is_kept_no_longer_than_its_call_and_other_rules_are(llama, prompt):
    cache, token = CompressedCache(llama.config, "none"), prompt["input_ids"][:, :1]
    llama(**prompt, **named(cache))
    assert cache._shared.asked is None
    configs = []
    for _ in range(2):
        llama(token, **named(cache))
        configs.append(cache._shared.asked.config)
    assert configs[0] is configs[1] and configs[0].mask is None


def test_handles_are_used_again_only_where_nothing_refers_to_them(llama):
    config = copy.deepcopy(llama.config)
    config.num_hidden_layers = 5
    cache = CompressedCache(config, "none")
    tokens = torch.randn(5, 2, 1, 2, 3, 16, generator=torch.Generator().manual_seed(1))
    kept = cache.update(*tokens[0], 0)
    first = cache.update(*tokens[1], 1)
    freed = [id(x) for x in first]
    assert not {id(x) for x in kept} & set(freed)
    del first
    again = cache.update(*tokens[2], 2)
    assert [id(x) for x in again] == freed
    one = again[1]  # of a pair of which the model keeps one
    del again
    later = cache.update(*tokens[3], 3)
    assert not {id(x) for x in later} & set(freed)
    last = cache.update(*tokens[4][..., :2, :], 4)
    assert [x.shape[2] for x in last] == [2, 2]
    for layer, pair in ((0, kept), (3, later)):
        assert all(map(torch.equal, pair, tokens[layer]))
    assert torch.equal(one, tokens[2][1])
    assert all(map(torch.equal, last, tokens[4][..., :2, :]))


def test_a_refused_step_leaves_no_tokens_behind(llama, prompt):
    cache, token = prefilled(llama, prompt), torch.zeros(2, 2, 1, 16)
    module, token[0] = llama.model.layers[0].self_attn, float("nan")
    with without_collector():
        with pytest.raises(NonFiniteError):
            pair = cache.update(token, token, 0)
            refused = weakref.ref(pair[0].pending)
            attention_forward(module, torch.zeros(2, 4, 1, 16), *pair, None)
        del pair
        assert refused() is None


def test_packed_only_attends_to_stored_slots(llama, prompt):
    """With `exact_new=False` the first chunk's logits differ already; otherwise they can't."""
    spec, inputs = "int:bits=2,sinks=0,window=0", {"input_ids": prompt["input_ids"][1:]}
    logits = {}
    for name, options in {
        "exact": {"spec": "none"},
        "new exact": {"spec": spec},
        "packed": {"spec": spec, "exact_new": False},
    }.items():
        cache = CompressedCache(llama.config, **options)
        logits[name] = llama(**inputs, **named(cache)).logits
    assert torch.allclose(logits["exact"], logits["new exact"], atol=1e-5)
    assert (logits["exact"] - logits["packed"]).abs().max() > 1e-2


@pytest.mark.parametrize("spec", ["none", "kivi:bits=2,window=0,sinks=0"])
def test_attention_that_refuses_a_mask_stores_nothing(llama, prompt, spec):
    """The next call goes on as if the refused one had never come."""
    ids = prompt["input_ids"][1:]
    cache = CompressedCache(llama.config, spec)
    llama(ids, **named(cache))
    before = [t.clone() for i in range(2) for t in inner(cache, i).tensors()]
    wrong = torch.ones(1, 1, 30, 69, dtype=torch.bool).tril(39)
    with pytest.raises(GeometryError, match="mask"):
        llama(ids[:, :30], attention_mask=wrong, **named(cache))
    assert [cache.get_seq_length(i) for i in range(2)] == [40, 40]
    after = [t for i in range(2) for t in inner(cache, i).tensors()]
    assert all(map(torch.equal, before, after))
    twin = CompressedCache(llama.config, spec)
    llama(ids, **named(twin))
    assert torch.equal(*(llama(ids, **named(held)).logits for held in (cache, twin)))


def test_one_mask_is_looked_at_once_for_all_layers(llama, prompt, monkeypatch):
    from kvpact.integrations.transformers.attention import forward as attention

    looked, given = [], attention.left_padding
    monkeypatch.setattr(attention, "left_padding", lambda m: looked.append(m) or given(m))
    cache, mask = CompressedCache(llama.config, "none"), prompt["attention_mask"]
    llama(**prompt, **named(cache))
    for end in (41, 42):
        row = torch.nn.functional.pad(mask, (0, end - 40), value=1)
        llama(prompt["input_ids"][:, :1], attention_mask=row, **named(cache))
    assert len(looked) == 3


def test_a_mask_that_changes_between_layers_is_looked_at_again(llama):
    """Equal tensors are told from changed ones: a model may write to its mask."""
    from kvpact.integrations.transformers.attention.forward import call_config

    layers = CompressedCache(llama.config, "none").layers
    k, mask = torch.ones(1, 2, 3, 16), torch.ones(1, 1, 3, 3, dtype=torch.bool)
    tokens = [layer.update(k, k)[0].pending for layer in layers]
    one = call_config(tokens[0], mask, 1.0, True, {})
    assert call_config(tokens[1], mask, 1.0, True, {}) is one
    mask[..., 0] = False
    two = call_config(tokens[1], mask, 1.0, True, {})
    assert one.padding is None
    assert two.padding.tolist() == [1]
    assert call_config(tokens[1], mask, 0.5, True, {}).softmax_scale == 0.5


def test_empty_cache(llama):
    cache = CompressedCache(llama.config, "int:bits=8")
    assert (cache.get_seq_length(), cache.memory_usage()) == (0, 0)
    assert cache.layers[0].keys is None
    assert cache.stats()["tokens"] == cache.stats()["bytes"]["total"] == 0


def test_slots_are_freed_with_the_cache(llama, prompt):
    """No cycle of references keeps them until the garbage collector comes."""
    with without_collector():
        cache = prefilled(llama, prompt)
        held = weakref.ref(inner(cache).k.tail)
        del cache
        assert held() is None


def test_a_model_with_more_layers_than_its_cache(make_model, sizes, prompt):
    small = LlamaConfig(**{**sizes, "num_hidden_layers": 1})
    large = make_model(LlamaConfig(**sizes))
    with pytest.raises(LayerIndexError, match=r"has a layer 1, its cache is for 1 layers"):
        large(**prompt, **named(CompressedCache(small, "none")))


def test_iterating_gives_what_a_dynamic_cache_gives(llama, prompt):
    exact = DynamicCache(config=llama.config)
    llama(**prompt, **named(exact))
    cache = prefilled(llama, prompt, "none")
    for one, other in zip(cache, exact, strict=True):
        for x, y in zip(one[:2], other[:2], strict=True):
            torch.testing.assert_close(x[1], y[1])  # the row without padding
        assert len(one) == len(other) and {*one[2:], *other[2:]} <= {None}


def test_layers_are_not_moved(llama, prompt):
    cache = prefilled(llama, prompt)
    before = cache.memory_usage()
    for move in (cache.offload, cache.prefetch):
        with pytest.raises(KVPactError, match=r"can't be moved: take snapshot\(\)"):
            move(0)
    assert cache.memory_usage() == before
