"""Calibrations: what is learnt of each layer, files, and what is refused."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from kvpact import CacheGeometry, Calibration, PagedKVCache, create_cache, parse_spec
from kvpact.calibration import LayerTokens, calibrate_layer
from kvpact.calibration.base import LayerCalibration
from kvpact.errors import FormatError, SpecError
from kvpact.testing import random_tokens

GEOMETRY = CacheGeometry(2, 2, 32, 16, torch.float32)
SPECS = [parse_spec(spec) for spec in ("pca:bits=2", "trellis:bits=3", "int:bits=8")]


def tokens(layer, count=256):
    k, v = random_tokens(2, 2, count, 32, seed=layer), random_tokens(2, 2, count, 16, seed=9)
    energy = random_tokens(2, 2, count, 32, seed=4).square() * torch.linspace(0.1, 9, 32)
    return LayerTokens(k, v, energy)


@pytest.fixture(scope="module")
def calibration():
    layers = {layer: calibrate_layer(tokens(layer), SPECS) for layer in range(2)}
    return Calibration(layers, "a model", 512)


def same(one, other):
    assert one.model == other.model and one.tokens == other.tokens
    assert sorted(one.layers) == sorted(other.layers)
    for index, held in one.layers.items():
        wanted = other.layers[index]
        assert replace(held, k={}, v={}) == replace(wanted, k={}, v={})
        for a, b in ((held.k, wanted.k), (held.v, wanted.v)):
            assert a.keys() == b.keys()
            for name, state in a.items():
                assert state.keys() == b[name].keys()
                assert all(torch.equal(x, b[name][part]) for part, x in state.items())


def test_one_state_serves_all_bits(calibration):
    assert sorted(calibration.layers[0].v) == ["pca/1"]
    assert len(calibration.layers[0].k) == 2  # and trellis, whose values learn nothing
    for spec in ("pca:bits=1", "pca:bits=3.5,states=8", "trellis:bits=2", "trellis:bits=4,seed=5"):
        states = calibration.states([parse_spec(spec)] * 2, GEOMETRY)
        cache = create_cache(spec, GEOMETRY, calibration=calibration)
        for layer in range(2):
            codec = cache.entry(layer).codecs[0]
            assert codec.ready
            assert all(torch.equal(x, states[layer][0][n]) for n, x in codec.state().items())
    assert calibration.states([parse_spec("int:bits=8")] * 2, GEOMETRY) == {}


def test_queries_are_learnt_from(calibration):
    plain = calibrate_layer(tokens(0)._replace(query_energy=torch.ones(2, 2, 256, 32)), SPECS)
    for name, part in (("pca/1", "weight"), (list(plain.k)[1], "weight")):
        weight = calibration.layers[0].k[name][part].float().view(2, 32)
        assert (weight[:, 24:] > 1.2 * weight[:, :8]).all()
        assert not torch.equal(weight, plain.k[name][part].float().view(2, 32))


def test_a_file_holds_all(calibration, tmp_path):
    path = tmp_path / "a.safetensors"
    calibration.save(path)
    same(Calibration.load(path), calibration)
    assert path.stat().st_size > calibration.nbytes > 0
    from safetensors.torch import load_file

    assert sum(x.nbytes for x in load_file(path).values()) > calibration.nbytes


def test_another_file_is_refused(tmp_path):
    path = tmp_path / "a.safetensors"
    create_cache("int:bits=8", GEOMETRY).snapshot().save(path)
    with pytest.raises(FormatError, match=r"kvpact\.calibration"):
        Calibration.load(path)
    with pytest.raises(FileNotFoundError):
        Calibration.load(tmp_path / "none")


@pytest.mark.parametrize("broken", [
    {"layers": {"0": {"shape": [2, 32], "k": {}, "v": {}}}, "model": "", "tokens": 0},
    {"layers": {"x": {"shape": [2, 32, 16], "k": {}, "v": {}}}, "model": "", "tokens": 0},
    {
        "layers": {"0": {"shape": [2, 32, 16], "k": {"a": ["b"]}, "v": {}}},
        "model": "",
        "tokens": 0,
    },
    {"layers": [], "model": "", "tokens": 0},
    {"layers": {}, "model": 1, "tokens": 0},
    {"layers": {}, "model": ""},
])  # fmt: skip
def test_wrong_headers_are_refused(broken, tmp_path):
    from kvpact.calibration.base import _container

    path = tmp_path / "a.safetensors"
    _container(broken, [{}] * len(broken["layers"])).save(path)
    with pytest.raises(FormatError):
        Calibration.load(path)


def test_what_is_not_there_is_told(calibration):
    with pytest.raises(SpecError, match="kvpact calibrate"):
        create_cache("trellis:bits=3,center=0", GEOMETRY, calibration=calibration)
    with pytest.raises(SpecError, match="of layer 1"):
        create_cache("pca", GEOMETRY, calibration=calibration.select([0]))
    with pytest.raises(SpecError, match="none of these methods"):
        calibrate_layer(tokens(0), SPECS[2:])
    with pytest.raises(SpecError, match="another model"):
        create_cache("pca", CacheGeometry(2, 1, 64), calibration=calibration)
    # Where some layers have the cache's shape, those of another learn by themselves.
    other = replace(calibration.layers[1], heads=1)
    mixed = replace(calibration, layers={0: calibration.layers[0], 1: other})
    cache = create_cache("pca", GEOMETRY, calibration=mixed)
    assert cache.entry(0).codecs is not None and cache.entry(1).codecs is None


def test_states_of_other_blocks_are_told():
    wide = LayerTokens(*(random_tokens(2, 2, 256, 64, seed=i).abs() for i in range(3)))
    held = Calibration({0: calibrate_layer(wide, [parse_spec("trellis:bits=4")])})
    geometry = CacheGeometry(1, 2, 64)
    assert create_cache("trellis:bits=5", geometry, calibration=held).entry(0).codecs[0].ready
    with pytest.raises(FormatError, match=r"K of layer 0 .*deviation.*run kvpact calibrate"):
        create_cache("trellis:bits=6", geometry, calibration=held)


def test_layers_are_chosen_in_order(calibration):
    chosen = calibration.select([1, 5, 0])
    assert sorted(chosen.layers) == [0, 2]
    assert chosen.layers[0] is calibration.layers[1] and chosen.layers[2] is calibration.layers[0]


def test_pages_share_a_calibration(calibration):
    cache = PagedKVCache("trellis:bits=3", GEOMETRY, 32, calibration=calibration)
    alone = create_cache("trellis:bits=3", GEOMETRY, calibration=calibration)
    k, v = random_tokens(1, 2, 200, 32, seed=3), random_tokens(1, 2, 200, 16, seed=4)
    seq = cache.allocate()
    for layer in range(2):
        cache.append(layer, {seq: (k[0], v[0])})
        alone.prefill(layer, k, v, None)
    restored = create_cache("trellis:bits=3", GEOMETRY, calibration=calibration)
    restored.restore(cache.snapshot(seq))
    assert torch.equal(restored.dequantize(1, "k"), alone.dequantize(1, "k"))


GOLDEN = Path(__file__).parent / "golden-v1.safetensors"


def test_the_first_version_is_read_and_codes_as_it_did():
    """Written once (`python tests/calibration/make_golden.py`); the codes are of fixed tokens."""
    held = Calibration.load(GOLDEN)
    assert (held.model, held.tokens, sorted(held.layers)) == ("golden", 512, [0])
    layer = held.layers[0]
    assert isinstance(layer, LayerCalibration) and (layer.heads, layer.key_dim) == (2, 16)
    spec = parse_spec("pca:bits=2")
    codec = spec.key.key_codec(16, torch.float32).restore(layer.k["pca/1"])
    x = (torch.arange(3 * 2 * 16).view(1, 2, 3, 16) * 37 % 101 / 25 - 2).float()
    codes = codec.encode(x)["codes"]
    assert codes.flatten().tolist() == layer.v["codes"]["codes"].tolist()
