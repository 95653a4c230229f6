"""What transformers' own layers hold beside compressed ones: rows, rollbacks, snapshots."""

import copy
from dataclasses import replace

import pytest
import torch
from families import crop_nothing
from tiny_configs import KINDS, WINDOW, interrupted, run
from transformers.cache_utils import DynamicSlidingWindowLayer

from kvpact import PagedKVCache, Snapshot, create_cache
from kvpact.errors import FormatError, GeometryError, IntegrityError, KVPactError, SnapshotError
from kvpact.integrations.transformers import CompressedCache
from kvpact.integrations.transformers.layers.engine_layers import attributes_of
from kvpact.snapshot.container import Container
from kvpact.snapshot.manifest import VERSIONS
from kvpact.snapshot.snapshot import KIND

every_model = pytest.mark.parametrize("name", KINDS)


def test_a_layer_that_is_not_known_is_refused_by_name():
    class NewLayer(DynamicSlidingWindowLayer):
        pass

    with pytest.raises(KVPactError, match="what transformers' NewLayer holds"):
        attributes_of(NewLayer(sliding_window=8))


def test_a_tensor_that_is_not_known_is_refused_by_name(filled):
    _, cache = filled("qwen3_next", 9)
    cache.layers[0].gates = torch.zeros(3, 2)
    with pytest.raises(KVPactError, match="LinearAttentionLayer holds 'gates'"):
        cache.batch_select_indices(torch.tensor([0]))
    assert cache.layers[0].recurrent_states[0].shape[0] == 3


@pytest.mark.parametrize(("name", "why"), [
    ("qwen3_next", "linear attention stands for all"),
    ("lfm2_conv", "a convolution has the last"),
    ("falcon_h1", "linear attention stands for all"),
    ("gemma3", "before the window of 16"),
    ("inkling", "a convolution has the last"),
])  # fmt: skip
def test_a_rollback_that_is_not_possible_changes_no_layer(name, why, filled, ids):
    model, cache = filled(name, 20)
    twin = copy.deepcopy(cache)
    with pytest.raises(KVPactError, match=why):
        cache.crop(-2)
    crop_nothing(cache)
    assert torch.equal(*(run(model, x, [ids[:, 20:23]]) for x in (cache, twin)))


@every_model
def test_after_a_reset_a_cache_takes_a_batch_of_another_size(name, filled, ids):
    model, cache = filled(name, 20)
    new = CompressedCache(model, "none")
    cache.reset()
    parts = ids[:2].split([20, 1, 39], dim=1)
    assert torch.equal(*(run(model, x, parts) for x in (cache, new)))


@every_model
@pytest.mark.parametrize("held", [5, WINDOW - 1, WINDOW, WINDOW + 1, 40])
def test_a_restored_cache_goes_on_bit_for_bit(name, held, make_model, sizes, ids):
    model = make_model(KINDS[name](sizes))
    spec = "int:bits=8,sinks=2,window=8"
    cache = CompressedCache(model, spec)
    run(model, cache, [ids[:, : held - 2], ids[:, held - 2 : held]])
    data = cache.snapshot(token_ids=ids[:, :held]).to_bytes()
    parts = ids[:, held:].split([1, 1, 3, 60 - held - 5], dim=1)
    wanted = run(model, cache, parts)
    again = CompressedCache(model, spec)
    run(model, again, [ids[:2, :7]])  # of another batch and length, which is forgotten
    again.restore(Snapshot.from_bytes(data))
    assert torch.equal(run(model, again, parts), wanted)
    assert again.snapshot().to_bytes() == cache.snapshot().to_bytes()


@every_model
def test_windows_and_states_matter(name, filled, ids):
    """Otherwise the tests of this file would show nothing."""
    model, cache = filled(name, 40)
    twin = copy.deepcopy(cache)
    for layer in twin._own_layers():
        for attribute in attributes_of(layer):
            value = getattr(layer, attribute.name)
            for tensor in value.values() if isinstance(value, dict) else [value]:
                if tensor is not None:
                    tensor.zero_()
    one, other = (run(model, x, [ids[:, 40:45]]) for x in (cache, twin))
    assert (one - other).abs().max() > 0.01 * one.abs().max()


@every_model
def test_rows_of_a_snapshot_are_those_of_the_batch(name, filled, ids):
    model, cache = filled(name, 30)
    rows = CompressedCache(model, "none")
    rows.restore(cache.snapshot().select([2, 0]))
    cache.batch_select_indices(torch.tensor([2, 0]))
    assert torch.equal(*(run(model, x, [ids[:2, 30:33]]) for x in (cache, rows)))


def test_a_snapshot_of_another_model_is_refused_and_changes_nothing(make_model, sizes, ids):
    nets = {name: make_model(KINDS[name](sizes)) for name in ("qwen3_next", "lfm2_conv", "gemma3")}
    caches = {name: CompressedCache(net, "none") for name, net in nets.items()}
    for name, net in nets.items():
        run(net, caches[name], [ids[:, :20]])
    twin = copy.deepcopy(caches["lfm2_conv"])
    with pytest.raises(GeometryError, match="keys of layer 0"):
        caches["lfm2_conv"].restore(caches["gemma3"].snapshot())
    with pytest.raises(GeometryError, match="lacks keys and values of the model's layer 0"):
        plain = create_cache("none", twin.layers[1].cache.geometry)
        plain.restore_state(twin.snapshot().state()._replace(records=()), "cpu")
        caches["gemma3"].restore(plain.snapshot())
    both = (caches["lfm2_conv"], twin)
    assert torch.equal(*(run(nets["lfm2_conv"], x, [ids[:, 20:24]]) for x in both))


def test_caches_of_k_and_v_alone_refuse_what_they_would_lose(filled):
    _, cache = filled("gemma3", 20)
    snapshot = cache.snapshot()
    geometry = snapshot.geometry
    with pytest.raises(GeometryError, match="windows or states of 1 more layers"):
        create_cache("none", geometry).restore(snapshot)
    with pytest.raises(GeometryError, match="windows or states of 1 more layers"):
        PagedKVCache("none", geometry, 8).restore(snapshot, row=0)
    with pytest.raises(GeometryError, match="stand at one count"):
        snapshot.slice(0, 0)


def test_every_flipped_bit_of_a_window_is_found(filled):
    model, cache = filled("gemma3", 20)
    snapshot = cache.snapshot()
    assert snapshot.manifest.version == 5
    assert snapshot.sizes()["windows and states"] == 2 * 3 * 2 * (WINDOW - 1) * 16 * 4
    data = snapshot.to_bytes()
    values = cache.layers[0].values.contiguous().numpy().tobytes()
    place = data.index(values)
    for offset in (0, len(values) // 2, len(values) - 1):
        damaged = bytearray(data)
        damaged[place + offset] ^= 1
        with pytest.raises(IntegrityError):
            Snapshot.from_bytes(damaged)
        with pytest.raises(IntegrityError):
            CompressedCache(model, "none").restore(Snapshot(Container(damaged, KIND, *VERSIONS)))


def test_records_in_a_file_of_an_older_version_are_refused(filled):
    _, cache = filled("gemma3", 20)
    data = cache.snapshot().to_bytes().replace(b'"version":"5"', b'"version":"4"')
    with pytest.raises((FormatError, IntegrityError)):
        Snapshot.from_bytes(data)


@pytest.mark.parametrize("name", ["inkling", "falcon_h1", "gemma3", "dots3"])
def test_an_interrupted_call_makes_no_snapshot(name, filled, ids):
    """Some layers have its tokens and others do not: restored, they would be out of step."""
    model, cache = filled(name, 40, "int:bits=8")
    with interrupted(model.model.layers[-1]):
        run(model, cache, [ids[:, 40:42]])
    with pytest.raises(SnapshotError, match="hold 40 and 42 tokens: a call"):
        cache.snapshot()
    cache.reset()
    run(model, cache, [ids[:, :40]])
    assert cache.snapshot().tokens == 40


@pytest.mark.parametrize("wrong", [
    {"name": "keys.0"},
    {"name": "gates"},
    {"layer": 1},
    {"tokens": 19},
    {"rows": 1, "tensor": torch.zeros(2, 3, WINDOW - 1, 16)},
    {"tensor": torch.zeros(3, 2, WINDOW, 16)},
    {"tensor": torch.zeros(3, 2)},
], ids=str)  # fmt: skip
def test_records_that_do_not_fit_change_nothing(wrong, filled, ids):
    """A file may say anything: what it says is compared with the layer before that changes."""
    model, cache = filled("gemma3", 20)
    twin = copy.deepcopy(cache)
    records = twin.snapshot().records()
    records[0] = replace(records[0], **wrong)
    forged = twin.held().snapshot_with(records)
    with pytest.raises(GeometryError, match="which this model's layer does not hold"):
        cache.restore(Snapshot.from_bytes(forged.to_bytes()))
    assert torch.equal(*(run(model, x, [ids[:, 20:24]]) for x in (cache, twin)))
