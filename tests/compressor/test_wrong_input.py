"""Wrong options, tensors and calls are named (defect B7)."""

import pytest
import torch
from one_layer import normal

import kvpact
from kvpact import errors


@pytest.mark.parametrize("make", [
    lambda: kvpact.LowRank(rank=0), lambda: kvpact.LowRank(rank=-1),
    lambda: kvpact.LowRank(energy=1.5), lambda: kvpact.LowRank(rank="16"),
    lambda: kvpact.Hybrid(rank=0), lambda: kvpact.Hybrid(quant_bits=3),
    lambda: kvpact.Hybrid(quant_bits=16), lambda: kvpact.VectorQuantization(codebook_size=1),
    lambda: kvpact.VectorQuantization(codebook_size=65_537),
    lambda: kvpact.VectorQuantization(stages=3), lambda: kvpact.KVCacheCompressor("lowrank:rank=0"),
    lambda: kvpact.KVCacheCompressor(kvpact.LowRank(), quant_bits=5),
    lambda: kvpact.KVCacheCompressor("no-such-method"), lambda: kvpact.KVCacheCompressor(16),
])  # fmt: skip
def test_wrong_options_are_named(make):
    with pytest.raises(errors.SpecError):
        make()


@pytest.mark.parametrize(("k", "v", "wanted"), [
    (normal(1, 2, 0, 64), normal(1, 2, 0, 64), errors.GeometryError),
    (normal(1, 2, 5, 64), normal(1, 2, 6, 64), errors.GeometryError),
    (normal(1, 2, 5, 64), normal(1, 3, 5, 64), errors.GeometryError),
    (normal(1, 2, 5, 64), normal(2, 2, 5, 64), errors.GeometryError),
    (normal(2, 5, 64), normal(2, 5, 64), errors.GeometryError),
    (normal(1, 2, 5, 64), normal(1, 2, 5, 64).half(), errors.DtypeError),
    (normal(1, 2, 5, 64).double(), normal(1, 2, 5, 64).double(), errors.DtypeError),
    (None, normal(1, 2, 5, 64), errors.DtypeError),
    (normal(1, 2, 5, 64) * torch.nan, normal(1, 2, 5, 64), errors.NonFiniteError),
    (normal(1, 2, 5, 64), normal(1, 2, 5, 64) / 0, errors.NonFiniteError),
])  # fmt: skip
def test_wrong_tensors_are_named(k, v, wanted: type[errors.KVPactError]):
    for method in ("lowrank:rank=4", "vq:codebook_size=4", "hybrid:rank=4", "int:bits=4"):
        with pytest.raises(wanted):
            kvpact.KVCacheCompressor(method).compress_kv(k, v)


def test_wrong_calls_are_named():
    compressor = kvpact.KVCacheCompressor("int:bits=4")
    batch = compressor.compress_kv(normal(2, 2, 5, 64), normal(2, 2, 5, 64))
    with pytest.raises(errors.GeometryError):
        compressor.decompress_kv_3d(batch)
    with pytest.raises(errors.DtypeError):
        compressor.decompress_kv(normal(2, 2, 5, 64))
    with pytest.raises(errors.GeometryError):
        batch.append(normal(2, 3, 5, 64), normal(2, 3, 5, 64))
    cache = kvpact.PagedKVCache("int:bits=4", kvpact.CacheGeometry(1, 2, 64), num_pages=2)
    with pytest.raises(errors.SequenceError):
        compressor.compress_paged_cache(cache, 0, 7)
    seq = cache.allocate()
    with pytest.raises(errors.GeometryError):
        compressor.compress_paged_cache(cache, 0, seq)
    with pytest.raises(kvpact.errors.LayerIndexError):
        compressor.compress_paged_cache(cache, 1, seq)
    with pytest.raises(errors.GeometryError):
        compressor.decompress_to_paged_cache(batch, cache, 0, seq)
