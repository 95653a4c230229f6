"""Defects of the third original in prefixes, speculative rollback and benchmarks.

C1 to C3, and C5 for the plain cache, are in `test_c_cache.py`.
"""

import copy
import importlib.util
import re
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from kvpact import CacheGeometry, PrefixCache, create_cache
from kvpact.integrations.fingerprint import model_fingerprint
from kvpact.integrations.transformers import CachedDraft, CompressedCache, prefix_cache
from kvpact.stores import MemoryStore, StoreWarning

GEOMETRY = CacheGeometry(2, 2, 16, dtype=torch.float32)
BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


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


def test_c4_a_chat_of_many_turns_is_stored_once_and_not_once_per_turn():
    ids = tokens(1024)[0].tolist()
    with MemoryStore() as turns, MemoryStore() as whole:
        for count in range(64, 1025, 64):
            assert PrefixCache(turns, filled(count), model="m").save(ids[:count]) == 1
        PrefixCache(whole, filled(1024), model="m").save(ids)
        assert turns.stats().bytes == whole.stats().bytes
        copies = sum(filled(count).memory_usage() for count in range(64, 1025, 64))
        assert copies > 5 * (turns.stats().bytes or 0)


def test_c4_a_part_of_an_entry_is_a_hit():
    ids = tokens(1024)[0].tolist()
    with MemoryStore() as store:
        PrefixCache(store, filled(1024), model="m").save(ids)
        for count in (65, 130, 700, 1023):
            prompt = [*ids[:count], 1, 2, 3]
            empty = create_cache("turboquant:bits=4", GEOMETRY)
            held = PrefixCache(store, empty, model="m").load(prompt)
            assert held == empty.seq_len(0) == count - count % 64


def test_c4_models_and_adapters_are_in_the_key():
    ids = tokens(128)[0].tolist()
    with MemoryStore() as store:
        PrefixCache(store, filled(128), model="m").save(ids)
        for options in ({"model": "n"}, {"model": "m", "adapter": "a"}):
            empty = create_cache("turboquant:bits=4", GEOMETRY)
            assert PrefixCache(store, empty, **options).load(ids) == empty.seq_len(0) == 0


def test_c4_times_of_files_decide_nothing_and_weights_do(model, tmp_path):
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


def test_c4_every_byte_is_under_a_checksum():
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


def test_c5_no_token_goes_through_the_target_twice(model):
    """Every position is committed once, and a rejected one is computed again from its own token."""
    draft = copy.deepcopy(model)
    draft.lm_head.weight.data.neg_()
    ids, options = tokens(30), {"max_new_tokens": 20, "do_sample": False}
    wanted = model.generate(ids, **options)
    one, two = CompressedCache(model.config, "none"), CompressedCache(draft.config, "none")
    seen = []
    hook = model.model.embed_tokens.register_forward_hook(
        lambda module, given, output: seen.append((one.get_seq_length(), given[0][0].tolist()))
    )
    helper = CachedDraft(draft, two, target=one)
    got = model.generate(ids, **options, past_key_values=one, assistant_model=helper)
    hook.remove()
    assert torch.equal(got, wanted)
    text = got[0].tolist()
    for start, part in seen:  # what stands before a step is the text so far, each token once
        assert part[0] == text[start], "a step begins behind what is held, with the next token"
    fresh = CompressedCache(model.config, "none")
    with torch.no_grad():
        model(got[:, :-1], past_key_values=fresh)
    for a, b in zip(one.layers, fresh.layers, strict=True):
        torch.testing.assert_close(a.keys, b.keys, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(a.values, b.values, rtol=1e-4, atol=1e-4)


def source_of(name):
    return (BENCHMARKS / f"{name}.py").read_text("utf-8")


def modules_of(name):
    """A script and the modules beside it that it is made of."""
    found, open_ = set(), [name]
    while open_:
        one = open_.pop()
        found.add(one)
        imports = re.findall(r"^(?:from|import) (\w+)", source_of(one), re.M)
        open_ += [x for x in imports if (BENCHMARKS / f"{x}.py").exists() and x not in found]
    return found


@pytest.fixture
def beside(monkeypatch):
    """Scripts find the modules beside them, as when they are run."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))


def load(name):
    spec = importlib.util.spec_from_file_location(f"benchmark_{name}", BENCHMARKS / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_c6_the_benchmark_of_stores_times_the_real_thing(tmp_path, monkeypatch):
    """The timed calls save what a cache holds and load it again; without them it fails."""
    bench = load("store")
    cache = bench.filled("turboquant:bits=4", GEOMETRY, 200)
    rows = bench.measure(cache, 1, tmp_path)
    whole = cache.snapshot()
    assert rows["file"]["bytes"] == whole.nbytes
    with MemoryStore() as store:
        PrefixCache(store, cache, model="random").save(list(range(200)))
        assert rows["memory"]["bytes"] == store.stats().bytes > 0
    assert all(row[name] > 0 for row in rows.values() for name in row)
    for name in ("save", "load"):
        monkeypatch.setattr(PrefixCache, name, lambda self, ids, name=name: 3)
        with pytest.raises(AssertionError, match="nothing was loaded"):
            bench.measure(cache, 1, tmp_path / name)
        monkeypatch.undo()


@pytest.mark.parametrize(
    "name", sorted(path.stem for path in BENCHMARKS.glob("*.py") if "def main(" in path.read_text())
)
def test_c6_every_benchmark_runs_kvpact_itself(beside, name):
    sources = [source_of(module) for module in modules_of(name)]
    # What lays figures out beside their targets measures nothing.
    assert name == "attend_lines" or any("from kvpact" in source for source in sources)
    for source in sources:
        for stub in ("time.sleep", "class Fake", "class Mock", "mock."):
            assert stub not in source
    assert callable(load(name).main)
