"""Sequences of paged caches, compressed and back."""

import pytest
import torch
from compressed import same
from torch import Tensor

from kvpact import CacheGeometry, CompressedKV, KVCacheCompressor, PagedKVCache, parse_spec
from kvpact.errors import CacheFull, GeometryError
from kvpact.testing import method_specs

GEOMETRY = CacheGeometry(2, 3, 64, 80)
# Groups of a cache leave its sinks out, so with groups slots stay as they are without sinks alone.
GROUPED = [*method_specs(fitted=False, grouped=True), "turboquant:bits=3,center=64/kivi"]
METHODS = [
    *method_specs(fitted=False, grouped=False),
    *(str(parse_spec(spec).with_options(sinks=0)) for spec in GROUPED),
]


def tokens(count: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = ((3, count, 64), (3, count, 80))
    k, v = (torch.randn(*shape, generator=generator) for shape in shapes)
    return k, v


def filled(spec: str, count: int, pages: int = 32, given=None) -> tuple[PagedKVCache, int]:
    cache = PagedKVCache(spec, GEOMETRY, pages)
    seq = cache.allocate()
    for layer in range(2):
        cache.append(layer, {seq: given or tokens(count, layer)})
    return cache, seq


@pytest.mark.parametrize("spec", METHODS)
@pytest.mark.parametrize("count", [1, 31, 300])
def test_slots_go_there_and_back(spec: str, count: int, tmp_path):
    cache, seq = filled(spec, count)
    compressor = KVCacheCompressor(spec)
    first = compressor.compress_paged_cache(cache, 1, seq)
    assert same(first, compressor.compress_kv_3d(*tokens(count, 1)))
    first.save(tmp_path / "x.safetensors")
    first = CompressedKV.load(tmp_path / "x.safetensors")
    other = PagedKVCache(spec, GEOMETRY, 32)
    target = other.allocate()
    for layer in range(2):
        compressor.decompress_to_paged_cache(first, other, layer, target)
    assert other.seq_len(target, 1) == count
    assert same(first, compressor.compress_paged_cache(other, 1, target))
    for layer in range(2):
        other.append(layer, {target: tokens(40, 7)})
    again = compressor.compress_paged_cache(other, 1, target)
    assert again.tokens == count + 40
    other.free(target)
    assert other.num_free_pages == other.num_pages


def with_outliers(spec: str, count: int):
    k, v = tokens(count, 1)
    k[:, :4] *= 10
    return k, v, *filled(spec, count, given=(k, v))


@pytest.mark.parametrize("spec", GROUPED)
def test_sinks_come_along_with_groups(spec: str):
    """They are outliers here, ten times as long as the others, and are encoded with their group."""
    k, v, cache, seq = with_outliers(spec, 200)
    held = KVCacheCompressor(spec).compress_paged_cache(cache, 1, seq).decompress()
    for x, y in zip((k, v), held, strict=True):
        for part in (slice(0, 4), slice(128, 200)):
            assert float((y[:, part] - x[:, part]).norm() / x[:, part].norm()) < 0.55


def test_after_a_rollback_and_beside_a_fork():
    for spec in ("kivi", "turboquant:bits=4", "kvarn"):
        cache, seq = filled(spec, 300)
        fork = cache.fork(seq)
        cache.truncate(seq, 150)
        compressor = KVCacheCompressor(spec)
        cut = compressor.compress_paged_cache(cache, 0, seq)
        assert cut.tokens == 150
        whole = compressor.compress_paged_cache(cache, 0, fork).decompress()
        for x, y in zip(cut.decompress(), whole, strict=True):
            torch.testing.assert_close(x[:, :96], y[:, :96], rtol=0, atol=0)


def test_another_method_takes_what_the_cache_gives():
    cache, seq = filled("int:bits=8", 200)
    compressor = KVCacheCompressor("lowrank:rank=80")
    compressed = compressor.compress_paged_cache(cache, 0, seq)
    assert max(compressed.error) < 1e-6
    for x, y in zip(compressor.decompress_kv_3d(compressed), tokens(200), strict=True):
        torch.testing.assert_close(x, y, rtol=0, atol=0.05)
    compressor.decompress_to_paged_cache(compressed, cache, 1, seq)
    assert cache.seq_len(seq, 1) == 400


def test_a_full_pool_changes_nothing():
    cache, seq = filled("int:bits=4", 100, pages=4)
    compressed = KVCacheCompressor("int:bits=4").compress_paged_cache(cache, 0, seq)
    other = cache.allocate()
    with pytest.raises(CacheFull):
        KVCacheCompressor("int:bits=4").decompress_to_paged_cache(compressed, cache, 0, other)
    assert (cache.seq_len(other), cache.num_free_pages) == (0, 0)


@pytest.mark.parametrize("shape", [(2, 64, 80), (3, 48, 80), (3, 64, 64)])
@pytest.mark.parametrize("spec", ["int:bits=4", "fp8"])
def test_heads_and_widths_that_do_not_fit_are_named_and_change_nothing(shape, spec: str):
    compressor = KVCacheCompressor("int:bits=4")
    compressed = compressor.compress_kv_3d(*tokens(20))
    cache = PagedKVCache(spec, CacheGeometry(1, *shape, torch.float32), 4)
    seq = cache.allocate()
    with pytest.raises(GeometryError, match=r"has .*, the cache"):
        compressor.decompress_to_paged_cache(compressed, cache, 0, seq)
    assert (cache.seq_len(seq), cache.num_free_pages) == (0, 4)


@pytest.mark.parametrize("spec", GROUPED)
def test_tokens_that_others_may_share_are_packed_once(spec: str):
    """A page that was published has slots of tokens that its sequence still reads exactly."""
    *_, cache, seq = with_outliers(spec, 96)
    compressor = KVCacheCompressor(spec)
    before = compressor.compress_paged_cache(cache, 1, seq)
    cache.publish(seq, range(96))
    assert same(before, compressor.compress_paged_cache(cache, 1, seq))
