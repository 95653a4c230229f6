"""Errors are the best that the bytes allow; bytes are those of the tensors (B1, B2, B3, B8)."""

import pytest
import torch
from one_layer import normal
from torch import Tensor

from kvpact import CompressedKV, Hybrid, KVCacheCompressor, LowRank


def error(x: Tensor, y: Tensor) -> float:
    return float((y.double() - x.double()).square().sum() / x.double().square().sum())


def errors(method, k: Tensor, v: Tensor) -> tuple[float, float, CompressedKV]:
    compressor = KVCacheCompressor(method)
    compressed = compressor.compress_kv(k, v)
    k_again, v_again = compressor.decompress_kv(compressed)
    found = error(k, k_again), error(v, v_again)
    assert compressed.error == pytest.approx(found, rel=1e-6, abs=1e-12)
    return *found, compressed


def test_tokens_that_are_appended_are_in_the_error():
    k, v = normal(1, 2, 200, 64, seed=1), normal(1, 2, 200, 64, seed=2)
    compressor = KVCacheCompressor("int:bits=4")
    compressed = compressor.compress_kv(k[:, :, :120], v[:, :, :120])
    compressed = compressed.append(k[:, :, 120:], v[:, :, 120:])
    k_again, v_again = compressor.decompress_kv(compressed)
    assert compressed.error == pytest.approx((error(k, k_again), error(v, v_again)), rel=1e-6)


# Low rank is a truncated SVD, and not the strongest coordinates.


def of_rank_16(seed: int, *owners: int) -> Tensor:
    """Return `[2, 4, 256, 128]` of rank 16: for all, or for each of rows and heads."""
    return normal(2, 4, 256, 16, seed=seed) @ normal(*owners, 16, 128, seed=seed + 1)


def test_data_of_rank_16_comes_back_at_rank_16():
    k, v = of_rank_16(1, 2, 4), of_rank_16(3, 2, 4)
    k_error, v_error, compressed = errors(LowRank(rank=16), k, v)
    assert max(k_error, v_error) < 1e-5
    assert compressed.nbytes < (k.nbytes + v.nbytes) / 4


def test_one_basis_for_all_heads():
    k, v = of_rank_16(1), of_rank_16(3)
    *found, compressed = errors(LowRank(rank=16, per_head=False), k, v)
    assert max(found) < 1e-5
    assert compressed.tensors()["k.state.basis"].shape == (1, 128, 16)


def test_the_error_is_that_of_the_best_approximation():
    k = normal(1, 1, 200, 64) * torch.linspace(3, 0.1, 64)
    tail = torch.linalg.svdvals(k[0, 0].double())[24:].square().sum() / k.double().square().sum()
    assert errors(LowRank(rank=24), k, k)[0] == pytest.approx(float(tail), rel=1e-4)


# Outliers cost bits, and not 16 bytes each.


def with_outlier_channels(seed: int) -> Tensor:
    x = normal(1, 8, 512, 128, seed=seed)
    x[..., torch.randperm(128, generator=torch.Generator().manual_seed(seed))[:8]] *= 10
    return x


def test_outlier_channels_cost_less_than_5_bits():
    k, v = with_outlier_channels(1), with_outlier_channels(2)
    k_error, v_error, compressed = errors(Hybrid(rank=128, quant_bits=4), k, v)
    assert max(k_error, v_error) < 0.02
    assert compressed.bits_per_value < 5


def test_no_outliers_no_exact_copies():
    k, v = normal(1, 8, 512, 128), normal(1, 8, 512, 128, seed=1)
    *found, compressed = errors(Hybrid(rank=128, quant_bits=4), k, v)
    assert max(found) < 0.02
    assert "k.slots.exact" not in compressed.tensors()
