"""Llama 3.2 Vision: layers of its cache hold an image and no token; they stay as they are."""

import copy

import pytest
import torch
from transformers import MllamaConfig, MllamaForConditionalGeneration

from kvpact import Snapshot
from kvpact.errors import KVPactError
from kvpact.integrations.transformers import CompressedCache, enable, prefix_cache, versions
from kvpact.integrations.transformers.versions import CACHE, crops_to_length, named
from kvpact.stores import MemoryStore

if not versions.KEEPS_LATENTS:
    pytest.skip("transformers before 5.15 does this otherwise", allow_module_level=True)

IMAGE, IMAGES = 250, [1, 3]
COARSE = "int:bits=4,sinks=0,window=0"


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    shape = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 4, "vocab_size": 256}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": 0}
    seen = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    seen |= {"num_global_layers": 1, "attention_heads": 4, "patch_size": 14, "image_size": 56}
    seen |= {"vision_output_dim": 64, "intermediate_layers_indices": [0], "max_num_tiles": 1}
    text = {**shape, **heads, "cross_attention_layers": IMAGES, "initializer_range": 0.2}
    seen["supported_aspect_ratios"] = [[1, 1]]
    config = MllamaConfig(text_config=text, vision_config=seen, image_token_index=IMAGE)
    model = MllamaForConditionalGeneration(config).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "gate" in name:
                weight.fill_(1.0)
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model


@pytest.fixture
def given():
    draw = torch.Generator().manual_seed(1)
    ids = torch.randint(3, 250, (1, 81), generator=draw)
    ids[:, 0] = IMAGE
    one, pixels = torch.ones(1, 1).long(), torch.randn(1, 1, 1, 3, 56, 56, generator=draw)
    text = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "max_new_tokens": 12}
    image = {"pixel_values": pixels, "aspect_ratio_ids": one, "aspect_ratio_mask": one[None]}
    return {**text, **image, "cross_attention_mask": torch.ones(1, 81, 1, 1).long()}


@pytest.mark.parametrize("more", [{}, {"num_beams": 3}], ids=["greedy", "beams"])
def test_tokens_are_those_of_the_exact_cache(model, given, more):
    want = model.generate(**given, **more)
    cache = CompressedCache(model, "none")
    assert torch.equal(model.generate(**given, **more, **named(cache)), want)
    with enable(model, "none"):
        assert torch.equal(model.generate(**given, **more), want)


def test_text_alone_leaves_these_layers_empty(model, given):
    text = {name: given[name] for name in ("input_ids", "attention_mask", "max_new_tokens")}
    text["input_ids"] = text["input_ids"].clamp(max=200)
    want, cache = model.generate(**text), CompressedCache(model, "none")
    assert torch.equal(model.generate(**text, **named(cache)), want)
    again = CompressedCache(model, "none")
    again.restore(Snapshot.from_bytes(cache.snapshot().to_bytes()))
    assert again.get_seq_length() == cache.get_seq_length() == 92
    assert not any(again.layers[i].is_initialized for i in IMAGES)
    prefixes = prefix_cache(MemoryStore(), model, cache, fingerprint="m")
    assert prefixes.save(want[0, :92].tolist()) > 0


def test_images_are_kept_whole_by_all_that_changes_a_cache(model, given):
    cache = CompressedCache(model, COARSE)
    out = model.generate(**given, **named(cache))
    images = [cache.layers[i].keys for i in IMAGES]
    assert [x.shape for x in images] == [images[0].shape] * 2 and images[0].shape[2] == 17
    assert cache.stats()["layers"] == {"compressed": 2, "native": 2}
    assert cache.stats()["own_bytes"] == 4 * images[0].nbytes
    assert cache.get_seq_length() == 92
    again = CompressedCache(model, COARSE)
    again.restore(Snapshot.from_bytes(cache.snapshot().to_bytes()))
    twin = copy.deepcopy(cache)
    for other in (again, twin):
        assert all(torch.equal(other.layers[i].keys, cache.layers[i].keys) for i in IMAGES)
    step = {"input_ids": out[:, -1:], "attention_mask": torch.ones(1, 93).long()}
    step["cross_attention_mask"] = torch.ones(1, 93, 1, 1).long()
    step |= {} if CACHE == "cache" else {"cache_position": torch.tensor([92])}
    with torch.no_grad():
        logits = [model(**step, **named(x)).logits for x in (cache, again, twin)]
    assert torch.equal(logits[0], logits[1]) and torch.equal(logits[0], logits[2])
    cache.crop(92 if crops_to_length() else -1)
    assert cache.get_seq_length() == 92 and cache.layers[1].keys.shape[2] == 17
    cache.batch_repeat_interleave(3)
    assert cache.layers[3].values.shape[0] == 3
    cache.reset()
    assert not cache.layers[1].is_initialized and cache.nbytes == 0


def test_prefixes_do_not_take_what_an_image_has_changed(model, given):
    cache = CompressedCache(model, COARSE)
    out = model.generate(**given, **named(cache))
    with pytest.raises(KVPactError, match="do not tell the images"):
        prefix_cache(MemoryStore(), model, cache, fingerprint="m").save(out[0, :92].tolist())
