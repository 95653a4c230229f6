"""Prefixes stored by another spec than the cache's."""

import pytest
import torch

from kvpact import Calibration, parse_spec
from kvpact.calibration import LayerTokens, calibrate_layer
from kvpact.errors import SpecError
from kvpact.testing.method_base import relative_error

from .conftest import calibration, fill, kv, prefix


def calibrated():
    layers = {}
    for layer in range(2):
        k, v = kv(range(0, 999, 2), layer)
        tokens = LayerTokens(k, v, torch.ones(1, 2, k.shape[2], 32))
        layers[layer] = calibrate_layer(tokens, [parse_spec("pca:bits=1.5")])
    return Calibration(layers)


@pytest.mark.parametrize("layout", ["contiguous", "paged", "view"])
def test_a_prefix_comes_back_by_the_caches_own_spec(store, make, ids, layout):
    own = "turboquant:bits=4,window=16"
    source, loaded = make(own, layout), make(own, layout)
    seqs = [cache.allocate() if layout == "paged" else None for cache in (source, loaded)]
    fill(source, ids, seq=seqs[0])
    plain = prefix(store, source)
    stored = prefix(store, source, storage="int:bits=8")
    assert stored.save(ids, seq=seqs[0]) == 4
    assert not set(stored.keys(ids)) & set(plain.keys(ids))
    assert plain.match(ids) == 0 and stored.match(ids) == 256
    assert prefix(store, loaded, storage="int:bits=8").load(ids, seq=seqs[1]) == 256
    entry = loaded.layer_of(seqs[1], 1) if layout == "paged" else None
    if layout == "contiguous":
        entry = loaded.entry(1)
    if entry is not None:
        assert str(entry.spec) == own and entry.length == 256
        k = kv(ids, 1)[0][:, :, :256]
        assert relative_error(k, entry.dequantize("k")) < 0.14  # coded twice
        assert torch.equal(entry.dequantize("k")[:, :, :4], k[:, :, :4])
    fill(loaded, ids, start=256, seq=seqs[1])


def test_caches_of_unlike_specs_share_what_is_stored(store, make, ids):
    """And those that learn from their own tokens need no calibration of their own."""
    known = calibrated()
    options = {"storage": "pca:bits=1.5", "calibration": known}
    source = fill(make("trellis:bits=4"), ids)
    assert prefix(store, source, **options).save(ids) == 4
    for spec in ("trellis:bits=4", "int:bits=8", "trellis:bits=2"):
        loaded = make(spec)
        assert prefix(store, loaded, **options).load(ids) == 256
        error = relative_error(kv(ids, 1)[0][:, :, :256], loaded.dequantize(1, "k"))
        assert error < 0.8  # these keys fill all directions; of real ones see the slow tests
    paged = make("lowrank:rank=31", "paged", calibration())
    seq = paged.allocate()
    assert prefix(store, paged, **options).load(ids, seq=seq) == 256


def test_storage_that_learns_needs_a_calibration(store, make):
    with pytest.raises(SpecError, match="fit"):
        prefix(store, make("int:bits=8"), storage="pca")
    with pytest.raises(SpecError, match="goes with storage"):
        prefix(store, make("int:bits=8"), calibration=calibrated())
    with pytest.raises(SpecError):
        prefix(store, make("int:bits=8"), storage="no_such")
