"""Latents of MLA caches, compressed and back."""

import pytest
import torch
from compressed import same
from torch import Tensor

import kvpact
from kvpact.errors import CacheFull, DtypeError, GeometryError, LayerIndexError, SequenceError
from kvpact.testing.data import by_name
from kvpact.testing.held import held_bytes

RANK, ROPE = 64, 32
# Groups of a cache leave its sinks out, so with groups slots stay as they are without sinks alone.
METHODS = [
    "none", "int:bits=4", "turboquant:bits=3,center=64,sinks=0", "kivi:bits=2,sinks=0/fp8",
    "kvarn:sinks=0",
]  # fmt: skip


def latents(count: int, seed: int = 0, batch: int = 2) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = ((batch, 1, count, RANK), (batch, 1, count, ROPE))
    c_kv, k_rope = (torch.randn(*shape, generator=generator) for shape in shapes)
    return c_kv, k_rope


@pytest.mark.parametrize("spec", METHODS)
@pytest.mark.parametrize("count", [1, 33, 300])
def test_packed_latents_go_there_and_back(spec: str, count: int, tmp_path):
    cache = kvpact.MLACache(spec, 2, RANK, ROPE, dtype=torch.float32)
    c_kv, k_rope = latents(count)
    cache.store(1, k=c_kv, v=k_rope)
    compressor = kvpact.KVCacheCompressor(spec)
    first = compressor.compress_mla_cache(cache, 1)
    assert first.k_shape == (2, 1, count, RANK) and first.v_shape == (2, 1, count, ROPE)
    # The same slots as of the latents themselves: nothing was expanded or quantised twice.
    assert same(first, kvpact.KVCacheCompressor(cache.specs[0]).compress_kv(c_kv, k_rope))
    first.save(tmp_path / "x.safetensors")
    first = kvpact.CompressedKV.load(tmp_path / "x.safetensors")

    other = kvpact.MLACache(spec, 2, RANK, ROPE, dtype=torch.float32)
    compressor.decompress_to_mla_cache(first, other, 1)
    assert other.seq_len(1) == count
    assert same(first, compressor.compress_mla_cache(other, 1))
    other.store(1, **by_name(*latents(40, 7)))
    assert compressor.compress_mla_cache(other, 1).tokens == count + 40


def test_between_layouts():
    spec = "turboquant:bits=4"
    plain = kvpact.MLACache(spec, 1, RANK, ROPE, dtype=torch.float32)
    plain.store(0, **by_name(*latents(100, batch=1)))
    compressor = kvpact.KVCacheCompressor(spec)
    packed = compressor.compress_mla_cache(plain, 0)
    paged = kvpact.PagedKVCache(spec, kvpact.CacheGeometry.mla(1, RANK, ROPE, torch.float32), 8)
    seq = paged.allocate()
    compressor.decompress_to_mla_cache(packed, paged, 0, seq)
    assert same(packed, compressor.compress_mla_cache(paged, 0, seq))
    back = kvpact.MLACache(spec, 1, RANK, ROPE, dtype=torch.float32)
    compressor.decompress_to_mla_cache(packed, back, 0)
    # A cache that holds something takes the tokens through its own method.
    compressor.decompress_to_mla_cache(packed, back, 0)
    assert back.seq_len(0) == 200
    assert torch.equal(back.dequantize(0, "k")[:, :, -64:], packed.decompress()[0][:, :, -64:])


def test_another_method_takes_what_the_cache_gives():
    cache = kvpact.MLACache("int:bits=8", 1, RANK, ROPE)
    c_kv, k_rope = latents(256)
    cache.store(0, k=c_kv, v=k_rope)
    found = kvpact.KVCacheCompressor("turboquant:bits=4").compress_mla_cache(cache, 0)
    assert str(found.spec) == "turboquant:bits=4/int:bits=8"
    k, v = found.decompress()
    assert 0.005 < float((k - c_kv).square().sum() / c_kv.square().sum()) < 0.0125
    assert float((v - k_rope).square().sum() / k_rope.square().sum()) < 1e-4


def test_padding_is_not_lost_silently():
    cache = kvpact.MLACache("int:bits=4", 1, RANK, ROPE)
    padded = kvpact.AttendConfig(padding=torch.tensor([0, 3]))
    cache.store(0, **by_name(*latents(10)), config=padded)
    compressor = kvpact.KVCacheCompressor("int:bits=4")
    with pytest.raises(GeometryError, match="rows with padding"):
        compressor.compress_mla_cache(cache, 0)
    cache.select(torch.tensor([0]))
    assert compressor.compress_mla_cache(cache, 0).tokens == 10


def test_what_does_not_fit_is_named_and_changes_nothing():
    compressor = kvpact.KVCacheCompressor("int:bits=4")
    heads = kvpact.create_cache("int:bits=4", kvpact.CacheGeometry(1, 1, RANK, ROPE))
    cache = kvpact.MLACache("int:bits=4", 2, RANK, ROPE, max_tokens=50)
    paged = kvpact.PagedKVCache("int:bits=4", kvpact.CacheGeometry.mla(1, RANK, ROPE), 4)
    cache.store(0, **by_name(*latents(10)))
    packed = compressor.compress_mla_cache(cache, 0)
    with pytest.raises(GeometryError, match="no latents; use compress_kv"):
        compressor.compress_mla_cache(heads, 0)
    with pytest.raises(DtypeError, match="an MLACache is wanted"):
        compressor.compress_mla_cache(torch.zeros(1), 0)
    with pytest.raises(LayerIndexError):
        compressor.compress_mla_cache(cache, 2)
    with pytest.raises(GeometryError, match="no tokens in layer 1"):
        compressor.compress_mla_cache(cache, 1)
    with pytest.raises(SequenceError, match="name one with seq_id"):
        compressor.compress_mla_cache(paged, 0)
    with pytest.raises(SequenceError, match="leave seq_id out"):
        compressor.compress_mla_cache(cache, 0, 0)
    before = held_bytes(cache), held_bytes(paged)
    with pytest.raises(GeometryError, match="2 rows can't become one sequence"):
        compressor.decompress_to_mla_cache(packed, paged, 0, paged.allocate())
    narrow = compressor.compress_kv(*(x[..., :16] for x in latents(5)))
    with pytest.raises(GeometryError, match="k has width 16, the cache 64"):
        compressor.decompress_to_mla_cache(narrow, cache, 1)
    many = kvpact.KVCacheCompressor(cache.specs[0]).compress_kv(*latents(51))
    with pytest.raises(CacheFull, match="51 tokens wanted, 50 allowed"):
        compressor.decompress_to_mla_cache(many, cache, 1)
    one_row = kvpact.KVCacheCompressor(cache.specs[0]).compress_kv(*latents(5, batch=1))
    with pytest.raises(GeometryError, match="batch 1, but other layers hold 2"):
        compressor.decompress_to_mla_cache(one_row, cache, 1)
    assert (held_bytes(cache), held_bytes(paged)) == before
