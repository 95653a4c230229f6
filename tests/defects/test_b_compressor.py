"""What the first compressor of K and V got wrong: B1, B2, B3, B5 (its pages), B7, B8."""

import pytest
import torch
from torch import Tensor

import kvpact
from kvpact import (
    CacheGeometry,
    CompressedKV,
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
from kvpact.testing.held import held_bytes


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def error(x: Tensor, y: Tensor) -> float:
    return float((y.double() - x.double()).square().sum() / x.double().square().sum())


def errors(method, k: Tensor, v: Tensor) -> tuple[float, float, CompressedKV]:
    compressor = KVCacheCompressor(method)
    compressed = compressor.compress_kv(k, v)
    k_again, v_again = compressor.decompress_kv(compressed)
    found = error(k, k_again), error(v, v_again)
    assert compressed.error == pytest.approx(found, rel=1e-6, abs=1e-12)
    return *found, compressed


# --- B1: the strongest coordinates in place of a truncated SVD.


def of_rank_16(kind: str, seed: int) -> Tensor:
    """Return `[2, 4, 256, 128]` of rank 16: for all heads, for each, or side by side."""
    factors = {
        "one for all": lambda: normal(2, 4, 256, 16, seed=seed) @ normal(16, 128, seed=seed + 1),
        "per head": lambda: normal(2, 4, 256, 16, seed=seed) @ normal(1, 4, 16, 128, seed=seed + 1),
        "per row": lambda: normal(2, 4, 256, 16, seed=seed) @ normal(2, 4, 16, 128, seed=seed + 1),
    }
    if kind in factors:
        return factors[kind]()
    side_by_side = normal(2, 256, 16, seed=seed) @ normal(16, 4 * 128, seed=seed + 1)
    return side_by_side.unflatten(2, (4, 128)).transpose(1, 2)


@pytest.mark.parametrize("kind", ["one for all", "per head", "per row", "side by side"])
def test_b1_data_of_rank_16_comes_back_at_rank_16(kind: str):
    k, v = of_rank_16(kind, 1), of_rank_16(kind, 3)
    k_error, v_error, compressed = errors(LowRank(rank=16), k, v)
    assert max(k_error, v_error) < 1e-5
    assert compressed.nbytes < (k.nbytes + v.nbytes) / 4


def test_b1_one_basis_for_all_heads():
    k, v = of_rank_16("one for all", 1), of_rank_16("one for all", 3)
    *found, compressed = errors(LowRank(rank=16, per_head=False), k, v)
    assert max(found) < 1e-5
    assert compressed.tensors()["k.state.basis"].shape == (1, 128, 16)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_b1_full_rank_loses_nothing(dtype: torch.dtype):
    k, v = normal(1, 2, 100, 64).to(dtype), normal(1, 2, 100, 96, seed=1).to(dtype)
    k_error, v_error, _ = errors("lowrank:rank=96", k, v)
    assert max(k_error, v_error) < 1e-6


def test_b1_the_error_is_that_of_the_best_approximation():
    k = normal(1, 1, 200, 64) * torch.linspace(3, 0.1, 64)
    tail = torch.linalg.svdvals(k[0, 0].double())[24:].square().sum() / k.double().square().sum()
    assert errors(LowRank(rank=24), k, k)[0] == pytest.approx(float(tail), rel=1e-4)


# --- B2: one INT4 scale for a whole tensor, and 16 bytes for each outlier.


def with_outlier_channels(seed: int) -> Tensor:
    x = normal(1, 8, 512, 128, seed=seed)
    x[..., torch.randperm(128, generator=torch.Generator().manual_seed(seed))[:8]] *= 10
    return x


def test_b2_outlier_channels_cost_less_than_5_bits():
    k, v = with_outlier_channels(1), with_outlier_channels(2)
    k_error, v_error, compressed = errors(Hybrid(rank=128, quant_bits=4), k, v)
    assert max(k_error, v_error) < 0.02
    assert compressed.bits_per_value < 5


def test_b2_no_outliers_no_exact_copies():
    k, v = normal(1, 8, 512, 128), normal(1, 8, 512, 128, seed=1)
    *found, compressed = errors(Hybrid(rank=128, quant_bits=4), k, v)
    assert max(found) < 0.02
    assert "k.slots.exact" not in compressed.tensors()


# --- B3: whole head vectors, the first ones as the start, two steps.


@pytest.mark.parametrize(
    ("method", "bits"),
    [
        (VectorQuantization(), 2),
        (VectorQuantization(codebook_size=16, dims=2), 2),
        (VectorQuantization(codebook_size=16, stages=2), 2),
    ],
)
def test_b3_two_bits_of_gaussian_data(method: VectorQuantization, bits: int):
    k, v = normal(1, 8, 1024, 128), normal(1, 8, 1024, 128, seed=1)
    k_error, v_error, compressed = errors(method, k, v)
    assert max(k_error, v_error) < 0.14
    # A scale per token and the codebook come on top.
    assert bits < compressed.bits_per_value < bits + 16 / 128 + 0.05


# --- B5: a page that is compressed is copied out and expanded.


def test_b5_slots_of_pages_are_not_quantised_again():
    cache = PagedKVCache("turboquant:bits=4", CacheGeometry(2, 2, 64), num_pages=8)
    seq, k, v = cache.allocate(), normal(2, 200, 64), normal(2, 200, 64, seed=1)
    for layer in range(2):
        cache.append(layer, {seq: (k, v)})
    compressor = KVCacheCompressor("turboquant:bits=4")
    copied = compressor.compress_paged_cache(cache, 1, seq).tensors()
    direct = compressor.compress_kv_3d(k, v).tensors()
    assert copied.keys() == direct.keys()
    assert all(torch.equal(copied[name], direct[name]) for name in direct)


# --- B7: wrong input, and K and V of unlike width.


@pytest.mark.parametrize(
    "make",
    [
        lambda: LowRank(rank=0),
        lambda: LowRank(rank=-1),
        lambda: LowRank(energy=1.5),
        lambda: LowRank(rank="16"),
        lambda: Hybrid(rank=0),
        lambda: Hybrid(quant_bits=3),
        lambda: Hybrid(quant_bits=16),
        lambda: VectorQuantization(codebook_size=1),
        lambda: VectorQuantization(codebook_size=65_537),
        lambda: VectorQuantization(stages=3),
        lambda: KVCacheCompressor("lowrank:rank=0"),
        lambda: KVCacheCompressor(LowRank(), quant_bits=5),
        lambda: KVCacheCompressor("no-such-method"),
        lambda: KVCacheCompressor(16),
    ],
)
def test_b7_wrong_options_are_named(make):
    with pytest.raises(SpecError):
        make()


@pytest.mark.parametrize(
    ("k", "v", "wanted"),
    [
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
    ],
)
def test_b7_wrong_tensors_are_named(k, v, wanted: type[KVPactError]):
    for method in ("lowrank:rank=4", "vq:codebook_size=4", "hybrid:rank=4", "int:bits=4"):
        with pytest.raises(wanted):
            KVCacheCompressor(method).compress_kv(k, v)


def test_b7_wrong_calls_are_named():
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


@pytest.mark.parametrize("method", ["lowrank:rank=80", "vq", "hybrid:rank=200", "kivi", "none"])
def test_b7_k_and_v_may_differ_in_width(method: str):
    k, v = normal(2, 3, 70, 96), normal(2, 3, 70, 80, seed=1)
    compressor = KVCacheCompressor(method)
    compressed = compressor.compress_kv(k, v)
    assert (compressed.k_shape, compressed.v_shape) == (k.shape, v.shape)
    again = compressor.decompress_kv(compressed)
    assert [x.shape for x in again] == [k.shape, v.shape]
    assert max(compressed.error) < 0.2


# --- B8: ratios by formula, outliers left out.


@pytest.mark.parametrize(
    "method",
    ["lowrank:rank=16", "vq", "hybrid:rank=128", "turboquant:bits=3", "kivi", "kvarn", "q4_0"],
)
def test_b8_bytes_are_those_of_the_tensors(method: str):
    k, v = with_outlier_channels(1)[:, :2, :200], with_outlier_channels(2)[:, :2, :200]
    compressed = KVCacheCompressor(method).compress_kv(k, v)

    assert compressed.nbytes == sum(x.nbytes for x in compressed.tensors().values())
    assert held_bytes(compressed) == compressed.nbytes
    assert compressed.bits_per_value == compressed.nbytes * 8 / (k.numel() + v.numel())


# --- B5 (its latents) and B6: the latent was expanded first, and was a latent per head and side.


def test_b6_a_token_has_one_latent_and_one_rotated_key_for_all_heads():
    cache = kvpact.MLACache("none", 1, 512, 64, dtype=torch.bfloat16)
    c_kv, k_rope = normal(1, 1, 40, 512).bfloat16(), normal(1, 1, 40, 64, seed=1).bfloat16()
    cache.store(0, c_kv, k_rope)
    # 128 heads or 4: what is held per token is r + d_rope numbers.
    assert cache.stats()["values"] == 40 * (512 + 64)
    assert torch.equal(cache.dequantize(0, "k"), c_kv)
    assert torch.equal(cache.dequantize(0, "v"), k_rope)
    for heads in (4, 128):
        w_uk, w_uv = normal(heads, 128, 512).bfloat16(), normal(heads, 128, 512).bfloat16()
        q_nope, q_rope = normal(1, heads, 1, 128).bfloat16(), normal(1, heads, 1, 64).bfloat16()
        new = c_kv[:, :, :1], k_rope[:, :, :1]
        output = cache.fork().attend_heads(0, *new, q_nope, q_rope, w_uk, w_uv)
        assert output.shape == (1, heads, 1, 128)


def test_b5_latents_are_compressed_as_latents():
    cache = kvpact.MLACache("none", 1, 512, 64)
    cache.store(0, normal(1, 1, 128, 512), normal(1, 1, 128, 64, seed=1))
    found = KVCacheCompressor("turboquant:bits=4").compress_mla_cache(cache, 0)
    assert found.nbytes == 128 * (512 // 2 + 2 + 64 + 4)
