"""The native kernels give the compressor the torch bodies' bytes and numbers."""

import pytest
import torch

from kvpact import KVCacheCompressor
from kvpact.errors import BackendUnavailable
from kvpact.kernels.cpu.library import _load

pytestmark = pytest.mark.skipif(isinstance(_load(), str), reason=f"native kernels: {_load()}")


def tokens(count: int, dtype: torch.dtype = torch.float32, seed: int = 0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(2, 2, 3, count, 64, generator=generator).to(dtype)


@pytest.mark.parametrize("dtype", (torch.float32, torch.float16, torch.bfloat16))
@pytest.mark.parametrize(
    "spec", ("turboquant:bits=4,center=64", "int:bits=8/kivi:bits=2", "fp8", "kvarn:group=128")
)
def test_bytes_numbers_and_errors_are_torchs(spec, dtype):
    found = []
    for kernel in ("torch", "cpu"):
        compressor = KVCacheCompressor(spec, backend=kernel)
        compressed = compressor.compress_kv(*tokens(1100, dtype)).append(*tokens(37, dtype, 1))
        k, v = compressor.decompress_kv(compressed)
        found.append(({**compressed.tensors(), "out.k": k, "out.v": v}, compressed.error))
        stats = compressor.stats()["compute"]
        assert set(stats["encode"]) == set(stats["decode"]) == {kernel}
    (a, error), (b, other) = found
    assert a.keys() == b.keys() and error == other
    for name in a:
        assert torch.equal(a[name].view(torch.uint8), b[name].view(torch.uint8)), name


def test_what_was_loaded_is_decoded_natively(tmp_path):
    k, v = tokens(300)
    torchs = KVCacheCompressor("turboquant:bits=4", backend="torch")
    torchs.compress_kv_3d(k[0], v[0]).save(tmp_path / "kv")
    compressor = KVCacheCompressor("turboquant:bits=4")
    loaded = type(compressor.compress_kv(k, v)).load(tmp_path / "kv")
    expected = loaded.decompress()
    before = dict(compressor.stats()["compute"]["decode"])
    found = compressor.decompress_kv_3d(loaded)
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))
    assert compressor.stats()["compute"]["decode"]["cpu"] == before["cpu"] + 2


def test_an_unknown_kernel_is_refused():
    with pytest.raises(BackendUnavailable, match="not known"):
        KVCacheCompressor("int:bits=4", backend="gpu")
