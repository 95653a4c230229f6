"""Entries are shared, keyed and checked: nothing is stored twice or given to another model (C4)."""

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from kvpact import CacheGeometry, PrefixCache, create_cache
from kvpact.integrations.fingerprint import model_fingerprint
from kvpact.integrations.transformers import CompressedCache, prefix_cache
from kvpact.stores import MemoryStore, StoreWarning

GEOMETRY = CacheGeometry(2, 2, 16, dtype=torch.float32)


def tokens(count, seed=0):
    return torch.randint(3, 96, (1, count), generator=torch.Generator().manual_seed(seed))


def filled(count, spec="turboquant:bits=4"):
    cache = create_cache(spec, GEOMETRY)
    generator = torch.Generator().manual_seed(0)
    for layer in range(2):
        k, v = torch.randn(2, 1, 2, 1024, 16, generator=generator)
        cache.prefill(layer, k[:, :, :count], v[:, :, :count])
    return cache


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=96, hidden_size=64, intermediate_size=96, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    net = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").eval()
    for parameter in net.parameters():
        parameter.data.mul_(1.5)
    return net


def test_a_chat_of_many_turns_is_stored_once_and_not_once_per_turn():
    ids = tokens(1024)[0].tolist()
    with MemoryStore() as turns, MemoryStore() as whole:
        for count in range(64, 1025, 64):
            assert PrefixCache(turns, filled(count), model="m").save(ids[:count]) == 1
        PrefixCache(whole, filled(1024), model="m").save(ids)
        assert turns.stats().bytes == whole.stats().bytes
        copies = sum(filled(count).memory_usage() for count in range(64, 1025, 64))
        assert copies > 5 * (turns.stats().bytes or 0)


def test_a_part_of_an_entry_is_a_hit():
    ids = tokens(1024)[0].tolist()
    with MemoryStore() as store:
        PrefixCache(store, filled(1024), model="m").save(ids)
        for count in (65, 130, 700, 1023):
            prompt = [*ids[:count], 1, 2, 3]
            empty = create_cache("turboquant:bits=4", GEOMETRY)
            held = PrefixCache(store, empty, model="m").load(prompt)
            assert held == empty.seq_len(0) == count - count % 64


def test_models_and_adapters_are_in_the_key():
    ids = tokens(128)[0].tolist()
    with MemoryStore() as store:
        PrefixCache(store, filled(128), model="m").save(ids)
        for options in ({"model": "n"}, {"model": "m", "adapter": "a"}):
            empty = create_cache("turboquant:bits=4", GEOMETRY)
            assert PrefixCache(store, empty, **options).load(ids) == empty.seq_len(0) == 0


def test_times_of_files_decide_nothing_and_weights_do(model, tmp_path):
    """The same weights saved again, later and elsewhere, are the same model."""

    def loaded(name):
        model.save_pretrained(tmp_path / name)
        return AutoModelForCausalLM.from_pretrained(tmp_path / name).eval()

    ids, first, again, other = tokens(130), loaded("one"), loaded("two"), loaded("three")
    with torch.no_grad():
        other.model.norm.weight[3] += 1
    assert model_fingerprint(first) == model_fingerprint(again) != model_fingerprint(other)
    with MemoryStore() as store:
        for net, held in ((first, 0), (again, 128), (other, 0)):
            cache = CompressedCache(net.config, "none")
            prefixes = prefix_cache(store, net, cache)
            assert prefixes.load(ids) == held
            net(ids[:, held:], past_key_values=cache)
            prefixes.save(ids)


def test_every_byte_is_under_a_checksum():
    ids = tokens(64)[0].tolist()
    with MemoryStore() as store:
        prefixes = PrefixCache(store, filled(64), model="m")
        prefixes.save(ids)
        (key,) = store.keys()
        good = store.get(key)
        for at in range(0, len(good), 101):
            store.put(key, good[:at] + bytes([good[at] ^ 0x10]) + good[at + 1 :])
            empty = create_cache("turboquant:bits=4", GEOMETRY)
            with pytest.warns(StoreWarning, match="chunk 0 of 1"):
                assert PrefixCache(store, empty, model="m").load(ids) == 0
            assert empty.seq_len(0) == 0
