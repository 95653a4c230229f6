"""Prefixes in transformers: what is loaded is not computed, and kinds never meet."""

import copy

import families
import pytest
import torch
import transformers
from packaging.version import Version
from tiny_configs import deepseek, gemma3
from transformers import LlamaConfig

from kvpact.errors import GeometryError, SnapshotError, SpecError
from kvpact.integrations.fingerprint import model_fingerprint
from kvpact.integrations.transformers import CompressedCache, prefix_cache
from kvpact.integrations.transformers.versions import named
from kvpact.stores import DirectoryStore, MemoryStore

SHAPE_AND_SEED = (1, 200), 4


@pytest.fixture
def computed(monkeypatch):
    """Return a function that runs a call and gives the tokens that went through a model."""

    def run(model, call):
        seen = []
        count = lambda module, given, output: seen.append(given[0].shape[1])  # noqa: E731
        with model.model.embed_tokens.register_forward_hook(count):
            return call(), sum(seen)

    return run


def generate(model, store, ids, greedy, spec="none", **options):
    """Load, generate, save; return tokens, how many were loaded, and chunks written."""
    cache = CompressedCache(model.config, spec)
    prefixes = prefix_cache(store, model, cache, **options)
    loaded = prefixes.load(ids[:, :-1])
    tokens = model.generate(ids, **named(cache), **greedy)
    return tokens, loaded, prefixes.save(tokens)


def test_only_the_rest_is_computed_and_the_tokens_are_the_same(
    tmp_path, llama, make_model, sizes, ids, greedy, computed
):
    wanted = llama.generate(ids, **greedy)
    with DirectoryStore(tmp_path) as store:
        first, loaded, written = generate(llama, store, ids, greedy)
        assert (loaded, written) == (0, 3) and torch.equal(first, wanted)
    again = make_model(LlamaConfig(**sizes))
    with DirectoryStore(tmp_path) as store:
        found, count = computed(again, lambda: generate(again, store, ids, greedy))
    assert found[1:] == (192, 0) and torch.equal(found[0], wanted)
    assert count == 1 + (200 - 192) + greedy["max_new_tokens"] - 1, "a probe, the rest, new tokens"


def test_a_chat_goes_on_from_its_own_answers(llama, ids, greedy):
    with MemoryStore() as store:
        first, _, written = generate(llama, store, ids, greedy)
        assert written == 3
        turn = torch.cat([first, ids[:, :60]], dim=1)  # 272 tokens
        second, loaded, written = generate(llama, store, turn, greedy)
        assert (loaded, written) == (192, 1)
        assert torch.equal(second, llama.generate(turn, **greedy))
        longer = torch.cat([turn, ids[:, :5]], dim=1)
        assert generate(llama, store, longer, greedy)[1] == 256


def test_chunked_prefill_goes_on_behind_the_prefix(llama, ids, greedy, computed):
    if Version(transformers.__version__) < Version("5.21"):  # its code alone tells
        pytest.skip("this transformers passes the whole prompt again, whatever a cache holds")
    with MemoryStore() as store:
        wanted, *_ = generate(llama, store, ids, greedy)
        options = {**greedy, "prefill_chunk_size": 3}
        (tokens, loaded, _), count = computed(llama, lambda: generate(llama, store, ids, options))
    assert loaded == 192 and torch.equal(tokens, wanted)
    assert count == 1 + 8 + greedy["max_new_tokens"] - 1


def test_latent_attention(make_model, sizes, ids, greedy):
    model = make_model(deepseek(sizes))
    wanted = model.generate(ids, **greedy)
    with MemoryStore() as store:
        assert torch.equal(generate(model, store, ids, greedy)[0], wanted)
        tokens, loaded, _ = generate(model, store, ids, greedy)
        assert loaded == 192 and torch.equal(tokens, wanted)
        assert generate(model, store, ids, greedy, "turboquant:bits=4")[1] == 0
        assert generate(model, store, ids, greedy, "turboquant:bits=4")[1] == 192


def test_two_models_adapters_methods_and_tenants_never_meet(llama, make_model, ids, greedy):
    """Equal in all but one: the weights of one layer, a config's number, adapter, tenant, spec."""
    changed = copy.deepcopy(llama)
    with torch.no_grad():  # as merging an adapter does
        changed.model.layers[0].self_attn.q_proj.weight.data[0, 0] += 1e-3
    rope = copy.deepcopy(llama)
    rope.config.rms_norm_eps *= 2
    half = copy.deepcopy(llama).to(torch.bfloat16)
    kinds = [(llama, {}), (changed, {}), (rope, {}), (half, {}), (llama, {"adapter": "a"}),
             (llama, {"tenant": "a"}), (llama, {"spec": "int:bits=8"}),
             (llama, {"chunk": 32})]  # fmt: skip
    greedy["max_new_tokens"] = 1
    with MemoryStore() as store:
        entries = 0
        for model, options in kinds:
            _, loaded, written = generate(model, store, ids, greedy, **options)
            assert loaded == 0, options
            entries += written
        assert entries == len(store) == 7 * 3 + 6
        for model, options in kinds:
            assert generate(model, store, ids, greedy, **options)[1] == 192


def test_a_fingerprint_given_is_not_computed_again(llama, ids, greedy, monkeypatch):
    with MemoryStore() as store:
        generate(llama, store, ids, greedy)
        known = model_fingerprint(llama)
        monkeypatch.setattr("kvpact.integrations.transformers.prefix.model_fingerprint", None)
        assert generate(llama, store, ids, greedy, fingerprint=known)[1] == 192


def test_what_is_refused(llama, ids, prompt):
    with MemoryStore() as store:
        cache = CompressedCache(llama.config, "none")
        prefixes = prefix_cache(store, llama, cache)
        with pytest.raises(GeometryError, match="1, T"):
            prefixes.load(prompt["input_ids"])
        llama(**prompt, **named(cache))
        with pytest.raises(GeometryError, match="one row without padding"):
            prefixes.save(prompt["input_ids"][:1])
        row = CompressedCache(llama.config, "none")
        padded = prompt["input_ids"][:1], prompt["attention_mask"][:1]
        llama(input_ids=padded[0], attention_mask=padded[1], **named(row))
        with pytest.raises(GeometryError, match="one row without padding"):
            prefix_cache(store, llama, row).save(padded[0])
        with pytest.raises(SpecError, match="tokenizer=tokenizer"):
            prefix_cache(store, llama, CompressedCache(llama.config, "vq"))
        assert len(store) == 0


@pytest.mark.parametrize("rope", [
    {"rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [4.0] * 8,
     "original_max_position_embeddings": 80, "rope_theta": 1e4, "factor": 4.0},
    {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4},
], ids=["longrope", "dynamic"])  # fmt: skip
@pytest.mark.parametrize("by_layer", [False, True])
def test_rope_that_depends_on_the_length_is_refused(make_model, sizes, rope, by_layer):
    if by_layer:
        plain = {"rope_type": "default", "rope_theta": 1e4}
        ropes = {"sliding_attention": plain, "full_attention": rope}
        if not hasattr(transformers, "PreTrainedConfig"):
            pytest.skip("this transformers has one rotation for all layers")
        config = gemma3(sizes, "full", "full", rope_parameters=ropes)
    else:
        config = LlamaConfig(**sizes, **families.rope(**rope))
    model = make_model(config)
    with MemoryStore() as store, pytest.raises(SnapshotError, match=rope["rope_type"]):
        prefix_cache(store, model, CompressedCache(model.config, "none"))


def test_other_rope_is_taken(make_model, sizes, ids, greedy):
    rope = {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4}
    model = make_model(LlamaConfig(**sizes, **families.rope(**rope)))
    with MemoryStore() as store:
        assert [generate(model, store, ids, greedy)[1] for _ in range(2)] == [0, 192]


@pytest.mark.parametrize("name", ["image_token_id", "video_token_index", "audio_start_token_id"])
def test_a_prefix_ends_before_an_image(llama, ids, name):
    """Two images have equal ids and other K and V; the text before them is shared."""
    ids[ids == 100] = 101
    with MemoryStore() as store:
        setattr(llama.config, name, 100)
        with_image = ids.clone()
        with_image[0, 140] = 100
        cache = CompressedCache(llama.config, "int:bits=4,window=0")
        llama(with_image, **named(cache))
        prefixes = prefix_cache(store, llama, cache)
        assert prefixes.save(with_image) == len(store) == 2
        again = prefix_cache(store, llama, CompressedCache(llama.config, "int:bits=4,window=0"))
        assert again.load(with_image) == again.match(ids) == 128
        text = CompressedCache(llama.config, "int:bits=4,window=0")
        llama(ids, **named(text))
        assert prefix_cache(store, llama, text).save(ids) == 1
        assert again.match(ids) == 192 and again.match(with_image) == 128
