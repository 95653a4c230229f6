"""Files that were written once stay readable, and what they learnt gives the same bytes."""

from pathlib import Path

import numpy as np
import pytest
from by_path import module_at

import kvpact
from kvpact import CompressedKV
from kvpact.compressor.stream import flat
from kvpact.testing.held import same_bytes
from kvpact.testing.specs import example_specs

FOLDER = Path(__file__).parent / "golden"
FILES = sorted(FOLDER.glob("*.safetensors"))
inputs = module_at(FOLDER / "make.py").inputs


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_golden_file(path: Path):
    compressed = CompressedKV.load(path)
    for x, y, error in zip(inputs(), compressed.decompress(), compressed.error, strict=True):
        lost = float((y.double() - x.double()).square().sum() / x.double().square().sum())
        assert lost == pytest.approx(error, rel=1e-3)
    for x, stream in zip(inputs(), (compressed.k, compressed.v), strict=True):
        group = stream.codec.group
        arrays = stream.codec.encode(flat(x).float()[:, :, : x.shape[2] // group * group])
        for field in stream.codec.fields:
            units = stream.held.slots[field.name].shape[2]
            storage = field.allocate(1, 2, units * field.tokens, x.device)
            field.write(storage, 0, arrays[field.name])
            assert same_bytes(storage, stream.held.slots[field.name]), field.name


def test_every_fitted_method_has_a_file_of_its_version():
    held = {(m.name, m.version) for path in FILES for m in [CompressedKV.load(path).spec.key]}
    keys = [kvpact.parse_spec(spec).key for spec in example_specs(fitted=True)]
    assert {(m.name, m.version) for m in keys} == held
    assert "exact" in CompressedKV.load(FOLDER / "hybrid-exact-v1.safetensors").k.held.slots
    assert np.isfinite([CompressedKV.load(path).error for path in FILES]).all()
