"""Files that were written once stay readable, and what they learnt gives the same bytes."""

import importlib.util
from pathlib import Path

import numpy as np
import pytest
import torch

import kvpact
from kvpact import CompressedKV
from kvpact.compressor.stream import flat
from kvpact.methods.fitted import FittedMethod
from kvpact.testing.held import same_bytes

FOLDER = Path(__file__).parent / "golden"
FILES = sorted(FOLDER.glob("*.safetensors"))


def inputs() -> tuple[torch.Tensor, torch.Tensor]:
    spec = importlib.util.spec_from_file_location("make_golden", FOLDER / "make.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.inputs()


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
    held = {
        (side.name, side.version)
        for path in FILES
        for side in (CompressedKV.load(path).spec.key, CompressedKV.load(path).spec.value)
    }
    methods = [m for m in kvpact.list_methods().values() if isinstance(m, type)]
    fitted = {(m.name, m.version) for m in methods if issubclass(m, FittedMethod)}
    assert fitted == held
    assert "exact" in CompressedKV.load(FOLDER / "hybrid-exact-v1.safetensors").k.held.slots
    assert np.isfinite([CompressedKV.load(path).error for path in FILES]).all()
