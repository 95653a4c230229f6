"""Snapshots of transformers caches, and fingerprints of models."""

import subprocess
import sys

import pytest
import torch
from tiny_configs import gemma3

from kvpact import CacheGeometry, Snapshot, create_cache, errors
from kvpact.integrations.fingerprint import fingerprint, model_fingerprint
from kvpact.integrations.transformers import CompressedCache, prefix_cache
from kvpact.integrations.transformers.versions import named
from kvpact.stores import MemoryStore

pytestmark = pytest.mark.usefixtures("no_grad")

SPEC = "turboquant:bits=4,window=8"


def test_goes_on_with_padding_and_generates_the_same(llama, prompt, greedy):
    cache = CompressedCache(llama.config, SPEC)
    llama(**prompt, **named(cache))
    snapshot = Snapshot.from_bytes(cache.snapshot(token_ids=prompt["input_ids"]).to_bytes())
    assert snapshot.manifest.layers[0].padding == (7, 0)
    restored = CompressedCache(llama.config, SPEC)
    restored.restore(snapshot)
    assert restored.get_seq_length() == 40
    mask = torch.cat([prompt["attention_mask"], torch.ones(2, 1).long()], 1)
    step = {"input_ids": torch.tensor([[5], [6]]), "attention_mask": mask}
    wanted = llama(**step, **named(cache)).logits
    assert torch.equal(llama(**step, **named(restored)).logits, wanted)
    assert restored.snapshot().digest == cache.snapshot().digest
    assert restored.memory_usage() == cache.memory_usage()


@pytest.mark.parametrize(("options", "again"), [
    ({"spec": {"default": SPEC, "layers": {1: "fp8"}}}, {}),
    ({"budget": "400kB"}, {"budget": "400kB"}),
    ({"spec": "int:bits=8", "sliding": "int:bits=4,window=4"}, {}),
])  # fmt: skip
def test_a_chat_that_is_saved_goes_on_in_another_cache(
    make_model, sizes, ids, options, again, tmp_path
):
    kinds = "sliding" if "sliding" in options else "full", "full"
    path, model = tmp_path / "chat", make_model(gemma3(sizes, *kinds))
    cache = CompressedCache(model, **options)
    model(ids, **named(cache))
    path.write_text("mine")
    with pytest.raises(errors.SnapshotError, match="is no snapshot: save to another"):
        cache.save(path)
    assert path.read_text() == "mine"
    cache.save(path, force=True)
    cache.save(path, token_ids=ids)  # an earlier snapshot is replaced
    loaded = CompressedCache.load(path, model, **again)
    assert loaded.snapshot(token_ids=ids).digest == cache.snapshot(token_ids=ids).digest
    with pytest.raises(errors.GeometryError, match=r"\d layers, the model compresses \d"):
        CompressedCache.load(path, gemma3(sizes, *kinds, "full"), **again)


@pytest.mark.parametrize("other", [{"num_key_value_heads": 1}, {"head_dim": 32}])
def test_a_snapshot_of_a_model_with_other_heads_is_refused(llama, prompt, other):
    cache = CompressedCache(llama.config, SPEC)
    llama(**prompt, **named(cache))
    config = type(llama.config)(**{**llama.config.to_dict(), **other})
    empty = CompressedCache(config, SPEC)
    heads, width = llama.config.num_key_value_heads, llama.config.head_dim
    (name, value) = next(iter(other.items()))
    told = rf"{heads} KV heads of width {width}, .*{name} \[{value}\].*another model"
    with pytest.raises(errors.GeometryError, match=told):
        empty.restore(cache.snapshot())
    assert empty.get_seq_length() == 0


def test_a_part_of_the_heads_is_a_process_own(llama, prompt, monkeypatch):
    """With tensor parallelism each process caches its heads, of which the config has all."""
    cache = CompressedCache(llama.config, SPEC)
    llama(**prompt, **named(cache))
    whole = {**llama.config.to_dict(), "num_key_value_heads": 2 * llama.config.num_key_value_heads}
    whole["num_attention_heads"] *= 2
    rank = CompressedCache(type(llama.config)(**whole), SPEC)
    with pytest.raises(errors.GeometryError, match="another model"):
        rank.restore(cache.snapshot())
    monkeypatch.setattr("torch.distributed.is_initialized", lambda: True)
    monkeypatch.setattr("torch.distributed.get_world_size", lambda: 2)
    rank.restore(cache.snapshot())
    assert rank.get_seq_length() == 40


def test_the_attention_is_known_as_soon_as_kvpact_is_imported():
    code = (
        "import kvpact.integrations.transformers; from transformers import LlamaConfig as C\n"
        "from transformers import LlamaForCausalLM as M\n"
        "c = C(hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1,"
        " vocab_size=8, attn_implementation='kvpact')\n"
        "print(M(c).config._attn_implementation)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["kvpact"]


def test_refusals_leave_the_cache_as_it_was(llama, prompt):
    cache = CompressedCache(llama.config, SPEC)
    with pytest.raises(errors.SnapshotError, match="empty"):
        cache.snapshot()
    llama(**prompt, **named(cache))
    before = cache.snapshot()
    with pytest.raises(errors.SpecError):
        CompressedCache(llama.config, "int:bits=4").restore(before)
    other = CompressedCache(llama.config, SPEC.replace("8", "9"))
    llama(**prompt, **named(other))
    with pytest.raises(errors.SpecError):
        cache.restore(other.snapshot())
    assert cache.snapshot().digest == before.digest


def test_fingerprints_know_weights_and_config_and_nothing_else(llama, make_model):
    first = model_fingerprint(llama)
    assert len(first) == 64
    assert model_fingerprint(make_model(llama.config)) == first
    assert model_fingerprint(make_model(llama.config, seed=1)) != first
    weights, config = {"a": torch.zeros(4), "b": torch.ones(2)}, {"x": 1}
    one = fingerprint(weights, config)
    assert fingerprint(dict(reversed(weights.items())), config) == one
    assert fingerprint(weights, {**config, "_name_or_path": "/somewhere"}) == one
    for other in (
        {"a": torch.zeros(4), "c": torch.ones(2)},
        {"a": torch.zeros(2, 2), "b": torch.ones(2)},
        {"a": torch.zeros(4, dtype=torch.int32), "b": torch.ones(2)},
        {"a": torch.zeros(4), "b": torch.tensor([1.0, 2.0])},
        {"a": torch.zeros(4)},
    ):
        assert fingerprint(other, config) != one
    assert fingerprint(weights, {"x": 2}) != one


def test_a_restored_cache_keeps_its_kernel_and_its_shape(llama, prompt):
    cache = CompressedCache(llama.config, "int:bits=4", backend="torch")
    llama(**prompt, **named(cache))
    saved = cache.snapshot()
    again = CompressedCache(llama.config, "int:bits=4", backend="torch")
    again.restore(saved)
    new = {"input_ids": torch.full((2, 1), 5)}
    wanted = llama(**new, **named(cache)).logits
    assert torch.equal(llama(**new, **named(again)).logits, wanted)
    for layer in again.layers:
        assert layer.cache.stats()["compute"]["requested"] == "torch"
    other = create_cache("int:bits=4", CacheGeometry(2, 1, 16, dtype=torch.float32))
    for index in range(2):
        other.store(index, k=torch.zeros(2, 1, 5, 16), v=torch.zeros(2, 1, 5, 16))
    length = again.get_seq_length()
    with pytest.raises(errors.GeometryError, match="the model's cache of"):
        again.restore(other.snapshot())
    assert again.get_seq_length() == length


class Adapted(torch.nn.Module):
    """As PEFT's layers: all adapters' weights are there, an attribute says which one is active."""

    def __init__(self, base):
        super().__init__()
        self.base, self._active_adapter = base, "one"


@pytest.mark.parametrize("how", ["peft_config", "_hf_peft_config_loaded", "layer"])
def test_adapters_that_are_not_merged_have_to_be_named(llama, how):
    plain = model_fingerprint(llama)
    assert model_fingerprint(llama, adapter="one") == plain
    if how == "layer":
        llama.model.layers[0].mlp = Adapted(llama.model.layers[0].mlp)
    else:
        setattr(llama, how, {"default": "a config"} if how == "peft_config" else True)
    for name in (None, ""):
        with pytest.raises(errors.MismatchError, match="adapter="):
            model_fingerprint(llama, adapter=name)
        with pytest.raises(errors.MismatchError, match="adapter="), MemoryStore() as store:
            cache = CompressedCache(llama.config, SPEC)
            prefix_cache(store, llama, cache, adapter=name, fingerprint=plain)
    one, two = (model_fingerprint(llama, adapter=name) for name in ("one", "two"))
    assert one == model_fingerprint(llama, adapter="one")
    assert len({plain, one, two}) == 3
