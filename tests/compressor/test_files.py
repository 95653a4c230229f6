"""Compressed K and V as files: the same bytes again, and nothing damaged gets in."""

import math

import pytest
import torch
from safetensors.torch import save_file

from kvpact import CompressedKV, KVCacheCompressor
from kvpact.compressor.files import FORMAT, VERSION
from kvpact.errors import FormatError, IntegrityError, SpecError
from kvpact.snapshot import Container
from kvpact.testing import method_specs
from kvpact.testing.held import same_bytes

METHODS = [*method_specs(), "turboquant:bits=3,center=64/kivi", "hybrid:rank=64"]


def compressed(method: str = "lowrank:rank=8", tokens: int = 141) -> CompressedKV:
    k = torch.randn(2, 2, tokens, 64, generator=torch.Generator().manual_seed(1))
    return KVCacheCompressor(method).compress_kv(k.half(), k[..., :48].half())


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("tokens", [3, 141])
def test_round_trip(method: str, tokens: int, tmp_path):
    given = compressed(method, tokens)
    given.save(tmp_path / "a.safetensors")
    again = CompressedKV.load(tmp_path / "a.safetensors")
    for name in ("spec", "layout", "error", "k_shape", "v_shape", "dtype"):
        assert getattr(again, name) == getattr(given, name)
    assert given.tensors().keys() == again.tensors().keys()
    assert all(same_bytes(x, again.tensors()[name]) for name, x in given.tensors().items())
    assert all(map(same_bytes, given.decompress(), again.decompress()))
    again.save(tmp_path / "b.safetensors")
    assert (tmp_path / "a.safetensors").read_bytes() == (tmp_path / "b.safetensors").read_bytes()
    assert again.to_bytes() == (tmp_path / "a.safetensors").read_bytes()
    k = torch.randn(2, 2, 9, 64).half()
    longer = [one.append(k, k[..., :48]).decompress() for one in (given, again)]
    assert all(map(same_bytes, *longer))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("tokens", [3, 64, 141])
@pytest.mark.parametrize("method", ["turboquant:bits=3,center=64/kivi", "int:bits=8", "fp8"])
def test_the_bytes_of_a_file_are_known_before(method: str, tokens: int, dtype: torch.dtype):
    k = torch.randn(2, 3, tokens, 80, generator=torch.Generator().manual_seed(0)).to(dtype)
    compressor = KVCacheCompressor(method, measure=False)
    file = compressor.compress_kv(k, k[..., :48]).to_bytes()
    assert len(file) == compressor.file_bytes(k.shape, k[..., :48].shape, dtype)
    assert math.isnan(CompressedKV.from_bytes(file).error.k)


def test_bytes_that_only_the_tokens_decide_are_refused():
    shape = (1, 1, 64, 64)
    with pytest.raises(SpecError, match="pass measure=False"):
        KVCacheCompressor("int:bits=8").file_bytes(shape, shape, torch.float16)
    for method in ("lowrank:rank=8", "int:bits=8/vq"):
        with pytest.raises(SpecError, match="not fitted"):
            KVCacheCompressor(method, measure=False).file_bytes(shape, shape, torch.float16)


def rewritten(path, change) -> None:
    """Write a changed file whose checksums are right."""
    file = Container.open(path, FORMAT, VERSION)
    tensors = {n: x for i in range(file.num_sections) for n, x in file.tensors(i).items()}
    manifest = dict(file.manifest)
    change(manifest, tensors)
    runs = [(1, [tensor.nbytes for tensor in tensors.values()])]
    Container.build(FORMAT, VERSION, manifest, list(tensors.items()), runs).save(path)


@pytest.mark.parametrize(("change", "said"), [
    (lambda manifest, tensors: manifest.update(slots=99), "slots of version 99"),
    (lambda manifest, tensors: manifest.update(layout="square"), "manifest.layout"),
    (lambda manifest, tensors: manifest.update(batch=3), "damaged: rows"),
    (lambda manifest, tensors: manifest.update(batch="2"), "damaged: manifest.batch"),
    (lambda manifest, tensors: manifest.update(dtype="int8"), "manifest.dtype"),
    (lambda manifest, tensors: manifest.pop("spec"), "damaged: manifest"),
    (lambda manifest, tensors: manifest["k"].pop("packed"), "manifest.k"),
    (lambda manifest, tensors: manifest["k"].update(packed=10**9), "unlike length"),
    (lambda manifest, tensors: manifest["k"].update(packed=-1), "manifest.k.packed"),
    (lambda manifest, tensors: manifest["k"].update(energy="much"), "manifest.k.energy"),
    (lambda manifest, tensors: manifest["v"].update(open=1), "K and V of unlike length"),
    (lambda manifest, tensors: manifest["v"].update(dim=10**6), ""),
    (lambda manifest, tensors: manifest.update(k=[]), "manifest.k"),
    (lambda manifest, tensors: tensors.pop("k.slots.coefficients"), "the tensors are"),
    (lambda manifest, tensors: tensors.update(other=torch.zeros(1)), "unknown tensors"),
])  # fmt: skip
def test_a_manifest_that_does_not_fit_is_refused_by_the_name_of_the_file(change, said, tmp_path):
    path = tmp_path / "x.safetensors"
    compressed(tokens=40).save(path)
    rewritten(path, change)
    with pytest.raises(FormatError) as error:
        CompressedKV.load(path)
    assert str(error.value).startswith(f"{path}: ") and said in str(error.value)
    with pytest.raises(FormatError) as error:
        CompressedKV.from_bytes(path.read_bytes())
    assert str(error.value).startswith("the bytes: ") and said in str(error.value)


@pytest.mark.parametrize(("kind", "version"), [("other", VERSION), (FORMAT, VERSION + 1)])
def test_other_formats_and_versions_are_refused(kind, version, tmp_path):
    path = tmp_path / "x.safetensors"
    Container.build(kind, version, {}, [("x", torch.zeros(2))], [(1, [8])]).save(path)
    with pytest.raises(FormatError, match="can be read"):
        CompressedKV.load(path)


def test_a_changed_tensor_is_found(tmp_path):
    path = tmp_path / "x.safetensors"
    compressed(tokens=40).save(path)
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(IntegrityError) as error:
        CompressedKV.load(path)
    assert str(error.value).startswith(f"{path}: section ")


def test_other_files_are_refused(tmp_path):
    path = tmp_path / "x.safetensors"
    save_file({"x": torch.zeros(2)}, str(path))
    with pytest.raises(FormatError):
        CompressedKV.load(path)
    with pytest.raises(FileNotFoundError):
        CompressedKV.load(tmp_path / "none.safetensors")
