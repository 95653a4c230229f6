"""Wrong options, tensors and calls are named (defect B7)."""

import pytest
import torch
from one_layer import normal

import kvpact
from kvpact import (
    CacheGeometry,
    Hybrid,
    KVCacheCompressor,
    LowRank,
    PagedKVCache,
    VectorQuantization,
)
from kvpact.errors import (
    DtypeError,
    GeometryError,
    KVPactError,
    NonFiniteError,
    SequenceError,
    SpecError,
)


@pytest.mark.parametrize("make", [
    lambda: LowRank(rank=0), lambda: LowRank(rank=-1), lambda: LowRank(energy=1.5),
    lambda: LowRank(rank="16"), lambda: Hybrid(rank=0), lambda: Hybrid(quant_bits=3),
    lambda: Hybrid(quant_bits=16), lambda: VectorQuantization(codebook_size=1),
    lambda: VectorQuantization(codebook_size=65_537), lambda: VectorQuantization(stages=3),
    lambda: KVCacheCompressor("lowrank:rank=0"), lambda: KVCacheCompressor(LowRank(), quant_bits=5),
    lambda: KVCacheCompressor("no-such-method"), lambda: KVCacheCompressor(16),
])  # fmt: skip
def test_wrong_options_are_named(make):
    with pytest.raises(SpecError):
        make()


@pytest.mark.parametrize(("k", "v", "wanted"), [
    (normal(1, 2, 0, 64), normal(1, 2, 0, 64), GeometryError),
    (normal(1, 2, 5, 64), normal(1, 2, 6, 64), GeometryError),
    (normal(1, 2, 5, 64), normal(1, 3, 5, 64), GeometryError),
    (normal(1, 2, 5, 64), normal(2, 2, 5, 64), GeometryError),
    (normal(2, 5, 64), normal(2, 5, 64), GeometryError),
    (normal(1, 2, 5, 64), normal(1, 2, 5, 64).half(), DtypeError),
    (normal(1, 2, 5, 64).double(), normal(1, 2, 5, 64).double(), DtypeError),
    (None, normal(1, 2, 5, 64), DtypeError),
    (normal(1, 2, 5, 64) * torch.nan, normal(1, 2, 5, 64), NonFiniteError),
    (normal(1, 2, 5, 64), normal(1, 2, 5, 64) / 0, NonFiniteError),
])  # fmt: skip
def test_wrong_tensors_are_named(k, v, wanted: type[KVPactError]):
    for method in ("lowrank:rank=4", "vq:codebook_size=4", "hybrid:rank=4", "int:bits=4"):
        with pytest.raises(wanted):
            KVCacheCompressor(method).compress_kv(k, v)


def test_wrong_calls_are_named():
    compressor = KVCacheCompressor("int:bits=4")
    batch = compressor.compress_kv(normal(2, 2, 5, 64), normal(2, 2, 5, 64))
    with pytest.raises(GeometryError):
        compressor.decompress_kv_3d(batch)
    with pytest.raises(DtypeError):
        compressor.decompress_kv(normal(2, 2, 5, 64))
    with pytest.raises(GeometryError):
        batch.append(normal(2, 3, 5, 64), normal(2, 3, 5, 64))
    cache = PagedKVCache("int:bits=4", CacheGeometry(1, 2, 64), num_pages=2)
    with pytest.raises(SequenceError):
        compressor.compress_paged_cache(cache, 0, 7)
    seq = cache.allocate()
    with pytest.raises(GeometryError):
        compressor.compress_paged_cache(cache, 0, seq)
    with pytest.raises(kvpact.errors.LayerIndexError):
        compressor.compress_paged_cache(cache, 1, seq)
    with pytest.raises(GeometryError):
        compressor.decompress_to_paged_cache(batch, cache, 0, seq)
