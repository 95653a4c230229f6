"""`KVCache`: snapshots and payloads, and what is refused of them."""

from dataclasses import replace

import numpy as np
import plain_caches
import pytest
import torch
from safetensors.torch import load

from kvpact import errors
from kvpact.cache import KVCache, KVSnapshot


@pytest.mark.parametrize("dtype", plain_caches.DTYPES)
@pytest.mark.parametrize("tokens", [0, 1, 5, plain_caches.ROOM])
def test_restored_as_it_was(tokens, dtype):
    cache = plain_caches.filled(tokens, dtype)
    snapshot, payload = cache.snapshot(), cache.to_payload()
    assert isinstance(payload, bytes) and snapshot.seq_len == tokens
    for form in (snapshot, payload, bytearray(payload), memoryview(payload)):
        other = plain_caches.filled(3, dtype)
        if form is snapshot:
            other.restore_from_snapshot(form)
        else:
            other.restore_from_payload(form)
        plain_caches.assert_same(plain_caches.state(cache), plain_caches.state(other))
        assert other.to_payload() == payload


def test_a_payload_is_a_safetensors_file():
    cache = plain_caches.filled(3)
    tensors = load(cache.to_payload())
    assert torch.equal(tensors["layer.1.k"], cache.get_keys(1))
    assert torch.equal(tensors["layer.0.v"], cache.get_values(0))


def test_a_snapshot_of_arrays_and_of_another_dtype():
    keys = [plain_caches.rows(2, i).numpy() for i in range(2)]
    values = [plain_caches.rows(2, 10 + i).half() for i in range(2)]
    cache = plain_caches.filled(5, torch.bfloat16)
    cache.restore_from_snapshot(KVSnapshot(keys, values, 2))
    assert torch.equal(cache.get_keys(1), plain_caches.rows(2, 1).bfloat16())
    assert torch.equal(cache.get_values(0), plain_caches.rows(2, 10).half().bfloat16())


def _changed(**changes):
    def make():
        held = plain_caches.filled(3).snapshot()
        return replace(held, **{name: change(held) for name, change in changes.items()})

    return make


BAD = torch.full((3, plain_caches.WIDTH), torch.nan)
WRONG = {
    "layers": (_changed(keys=lambda s: s.keys[:1], values=lambda s: s.values[:1]), "layers"),
    "layers of keys": (_changed(keys=lambda s: (*s.keys, s.keys[0])), "layers"),
    "shorter": (_changed(values=lambda s: (s.values[0], s.values[1][:2])), "2 tokens"),
    "longer": (_changed(seq_len=lambda s: 2), "3 tokens"),
    "width": (_changed(keys=lambda s: (s.keys[0], plain_caches.rows(3, width=4))), "shape"),
    "negative": (_changed(seq_len=lambda s: -1), "seq_len"),
    "NaN": (_changed(values=lambda s: (s.values[0], BAD)), "NaN"),
    "integers": (_changed(keys=lambda s: (s.keys[0], np.zeros((3, 5), int))), "cast"),
}


@pytest.mark.parametrize(("make", "match"), WRONG.values(), ids=WRONG)
def test_wrong_snapshots_change_nothing(make, match):
    cache = plain_caches.filled(4)
    cache.store_kv(1, plain_caches.rows(1), plain_caches.rows(1))
    call = cache.restore_from_snapshot
    plain_caches.assert_refused(cache, errors.KVPactError, call, make(), match=match)


def test_what_is_too_long_is_not_cut():
    cache, long = plain_caches.filled(4), plain_caches.filled(9, room=9)
    for call, given in (
        (cache.restore_from_snapshot, long.snapshot()),
        (cache.restore_from_payload, long.to_payload()),
    ):
        plain_caches.assert_refused(cache, errors.CacheFull, call, given, match="9 tokens")


def test_payloads_of_other_caches_change_nothing():
    cache = plain_caches.filled(2)
    layers, room, width = plain_caches.LAYERS, plain_caches.ROOM, plain_caches.WIDTH
    for error, shape in (
        (errors.DtypeError, (layers, room, width, "float16")),
        (errors.GeometryError, (layers, room, width + 1)),
        (ValueError, (layers + 1, room, width)),
    ):
        payload = KVCache(*shape).to_payload()
        plain_caches.assert_refused(cache, error, cache.restore_from_payload, payload)
    for wrong in (None, "text", b"", b"\0" * 64, 5, [1, 2]):
        plain_caches.assert_refused(cache, errors.FormatError, cache.restore_from_payload, wrong)


def small() -> KVCache:
    cache = KVCache(1, 2, 3, torch.float16)
    cache.store_kv(0, plain_caches.rows(2, 1, width=3), plain_caches.rows(2, 2, width=3))
    cache.advance(2)
    return cache


def test_a_changed_byte_and_another_length_are_refused():
    payload, cache = small().to_payload(), small()
    places = range(len(payload))
    flipped = (payload[:i] + bytes([payload[i] ^ 1]) + payload[i + 1 :] for i in places)
    for wrong in (*flipped, payload[:-1], payload + b"\0", b""):
        with pytest.raises((errors.FormatError, errors.IntegrityError)):
            cache.restore_from_payload(wrong)
    assert torch.equal(cache.get_keys(0), small().get_keys(0))


@pytest.mark.parametrize("wrong", [
    {"num_layers": 2}, {"num_layers": 1 << 60, "seq_len": 0}, {"num_layers": 0, "seq_len": 0},
    {"seq_len": -1}, {"kv_dim": True}, {"seq_len": 1}, {"seq_len": 0}, {"kv_dim": 6},
    {"dtype": "float32"}, {"dtype": "object"}, {"dtype": ["float16"]}, {"more": 1},
], ids=str)  # fmt: skip
def test_manifests_that_do_not_fit_their_tensors_are_refused(wrong):
    """Well-formed files, their checksums right."""
    from kvpact.cache.plain import KIND, VERSION
    from kvpact.snapshot import Container

    good = Container(small().to_payload(), KIND, VERSION)
    tensors = list(good.tensors(0).items())
    manifest = {k: v for k, v in good.manifest.items() if k != "sections"}
    sizes = good.manifest["sections"]
    again = Container.build(KIND, VERSION, manifest, tensors, sizes)
    assert again.to_bytes() == small().to_payload()
    bad = Container.build(KIND, VERSION, manifest | wrong, tensors, sizes)
    cache = small()
    with pytest.raises(errors.KVPactError):
        cache.restore_from_payload(bad.to_bytes())
    assert torch.equal(cache.get_keys(0), small().get_keys(0))
