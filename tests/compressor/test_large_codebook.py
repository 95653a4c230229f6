"""A codebook of 65,536 words: the search for the nearest, and the whole way at 4 bits per value."""

import math

import pytest
import torch
from one_layer import normal
from torch import Tensor

from kvpact import KVCacheCompressor, VectorQuantization
from kvpact.quantizers import kmeans as module
from kvpact.quantizers.kmeans import kmeans, nearest

SIZE = 65_536
LLOYD_MAX_4_BITS = 0.009501  # least distortion of a scalar quantiser with 16 levels on N(0, 1)


def oracle(x: Tensor, words: Tensor) -> Tensor:
    """The nearest word in float64, all distances written out."""
    distances = [(x.double() - word).square().sum(-1) for word in words.double()]
    return torch.stack(distances).argmin(0)


@pytest.mark.parametrize("spread", [0.0, 1.0, 30.0], ids=["alike", "normal", "far out"])
def test_words_that_are_left_out_are_never_the_nearest(spread: float):
    words = normal(6000, 3)
    x = torch.cat([normal(1500, 3, seed=1) * spread, words[:40], words[:40] + 1e-4])
    assert len(words) > module._MANY_WORDS and len(x) > module._CELLS
    found = nearest(x, words)
    assert torch.equal(found, module._by_coordinate(x, words))
    wanted = oracle(x, words)
    far = (x - words[found]).double().square().sum(-1)
    assert (far <= (x - words[wanted]).double().square().sum(-1) + 1e-4).all()
    assert (found == wanted).double().mean() > 0.99


def test_a_search_does_not_depend_on_the_batch():
    words = torch.cat([normal(5000, 4), normal(500, 4)])  # the last 500 stand there twice
    x = torch.cat([normal(1200, 4, seed=2), words[5000:]])
    whole = nearest(x, words)
    parts = torch.cat([nearest(part, words) for part in x.split(7)])
    assert torch.equal(whole, parts)
    assert torch.equal(whole[1200:], torch.arange(500)), "of equally near words the first"


def test_memory_is_bounded(monkeypatch):
    """No tensor of the search is as large as all distances would be."""
    largest = [0]
    scan = module._scan

    def watched(x: Tensor, words: Tensor) -> Tensor:
        largest[0] = max(largest[0], min(len(x), max(module._CHUNK // len(words), 1)) * len(words))
        return scan(x, words)

    monkeypatch.setattr(module, "_scan", watched)
    nearest(normal(3000, 4), normal(SIZE, 4, seed=1))
    assert 0 < largest[0] <= module._CHUNK


@pytest.mark.slow
def test_large_codebooks_start_where_tokens_are():
    x = torch.cat([normal(20_000, 2), normal(4000, 2) + 100])
    words = kmeans(x, 5000, torch.Generator().manual_seed(0), steps=3)
    share = float((words[:, 0] > 50).double().mean())
    assert 0.02 < share < 0.5
    error = (x - words[nearest(x, words)]).square().mean()
    assert error < 2e-3


@pytest.mark.slow
def test_65536_words_end_to_end():
    """Without noise, 4 bits per value in words of 4 reach .0063 (Zador's constant of D4)."""
    method = VectorQuantization(codebook_size=SIZE)
    compressor = KVCacheCompressor(method)
    k, v = normal(1, 8, 1024, 128), normal(1, 8, 1024, 128, seed=1)
    compressed = compressor.compress_kv(k, v)
    tensors = compressed.tensors()
    codebooks = [tensors[f"{side}.state.codebooks"] for side in "kv"]
    assert all(book.shape == (1, SIZE, 4) for book in codebooks)
    values = k.numel() + v.numel()
    bits = 4 + 16 / 128 + sum(book.nbytes for book in codebooks) * 8 / values
    assert compressed.bits_per_value == pytest.approx(bits)
    assert compressed.nbytes == sum(tensor.nbytes for tensor in tensors.values())
    codec = method.key_codec(128, torch.float32).restore({"codebooks": codebooks[0]})
    x = normal(1, 2, 256, 128, seed=2)
    decoded = codec.transform.inverse(codec.decode(codec.encode(x)))
    error = float((decoded - x).square().sum() / x.square().sum())
    assert math.pow(4, -4) < error < LLOYD_MAX_4_BITS
    assert max(compressed.error) < LLOYD_MAX_4_BITS
    again = compressor.decompress_kv(compressed)
    for given, back, lost in zip((k, v), again, compressed.error, strict=True):
        found = float((back - given).double().square().sum() / given.double().square().sum())
        assert found == pytest.approx(lost, rel=1e-6)
