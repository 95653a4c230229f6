"""Files that are cut short while a snapshot of them is open: a named error, wherever it is."""

import copy
import os
import pickle
from pathlib import Path

import pytest
import torch

from kvpact import CacheGeometry, Snapshot, create_cache
from kvpact.errors import IntegrityError
from kvpact.snapshot import container
from kvpact.snapshot.manifest import VERSIONS
from kvpact.snapshot.snapshot import KIND

SHAPE = CacheGeometry(num_layers=2, num_kv_heads=2, head_dim=64, dtype=torch.float32)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    cache = create_cache("int:bits=4", SHAPE)
    for layer in range(2):
        k, v = torch.randn(2, 1, 2, 300, 64, generator=torch.Generator().manual_seed(layer))
        cache.prefill(layer, k, v)
    cache.snapshot().save(tmp_path / "a.safetensors")
    return tmp_path / "a.safetensors"


@pytest.fixture(params=["at a place", "after a seek"], autouse=True)
def reading(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "after a seek":  # as on Windows
        monkeypatch.delattr("os.preadv")


@pytest.mark.parametrize("left", [0, 4, 5000, -1])
def test_what_was_cut_off_is_told(path: Path, tmp_path: Path, left: int):
    size, held = path.stat().st_size, Snapshot.open(path)
    os.truncate(path, left % size)
    cut = f"cut short to {left % size} of {size} bytes"
    works = (held.verify, held.to_bytes, lambda: held.save(tmp_path / "b"), lambda: held.layer(1))
    for work in works:
        with pytest.raises(IntegrityError, match=cut):
            work()
    assert os.listdir(tmp_path) == ["a.safetensors"] and held.tokens == 300
    cache = create_cache("int:bits=4", SHAPE)
    with pytest.raises(IntegrityError, match=cut):
        cache.restore(held)
    assert cache.seq_len(0) == cache.seq_len(1) == 0


def test_a_file_that_is_cut_while_its_header_is_read(path: Path, monkeypatch):
    real = container.header_length

    def cut(first: bytes, total: int) -> int:
        os.truncate(path, 8)
        return real(first, total)

    monkeypatch.setattr("kvpact.snapshot.container.header_length", cut)
    with pytest.raises(IntegrityError, match="cut short"):
        Snapshot.open(path)


def test_an_opened_file_is_the_one_that_was_opened(path: Path, tmp_path: Path):
    data, held = path.read_bytes(), Snapshot.open(path)
    path.unlink()
    path.write_bytes(b"another")
    held.save(tmp_path / "b")
    assert held.to_bytes() == (tmp_path / "b").read_bytes() == data
    descriptors = Path("/proc/self/fd")
    if descriptors.exists():
        before = len(os.listdir(descriptors))
        del held
        assert len(os.listdir(descriptors)) == before - 1


def test_nothing_of_a_file_is_mapped(path: Path):
    assert type(container.Container.open(path, KIND, *VERSIONS).buffer).__name__ == "_File"
    maps = Path("/proc/self/maps")
    held = Snapshot.open(path)
    held.verify()
    if maps.exists():
        assert path.name not in maps.read_text()


def test_a_snapshot_is_pickled_as_its_checked_bytes(path: Path):
    held = Snapshot.open(path)
    for again in (pickle.loads(pickle.dumps(held)), copy.deepcopy(held), copy.copy(held)):
        assert type(again) is Snapshot and again.to_bytes() == path.read_bytes()
    data = bytearray(pickle.dumps(held))
    data[len(data) // 2] ^= 1
    with pytest.raises(IntegrityError):
        pickle.loads(data)
