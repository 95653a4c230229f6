"""Codecs that are fitted: what is learnt, when, and what is refused."""

import pytest
import torch
from one_layer import normal

from kvpact import Hybrid, LowRank, VectorQuantization
from kvpact.errors import GeometryError
from kvpact.quantizers.kmeans import kmeans, nearest


def test_heads_that_were_not_fitted_are_refused():
    for method in (LowRank(rank=8), Hybrid(rank=8), Hybrid(rank=64)):
        codec = method.key_codec(64, torch.float32).fit(normal(1, 2, 100, 64))
        with pytest.raises(GeometryError, match="heads"):
            codec.encode(normal(1, 3, 5, 64))


def test_energy_chooses_the_least_rank():
    x = normal(1, 1, 500, 64) * torch.linspace(2, 0.01, 64)
    values = torch.linalg.svdvals(x[0, 0].double()).square()
    kept = values.cumsum(0) / values.sum()
    codec = LowRank(energy=0.95).key_codec(64, torch.float32).fit(x)
    assert codec.rank == int((kept < 0.95).sum()) + 1
    assert codec.lost == pytest.approx(1 - float(kept[codec.rank - 1]), abs=1e-6)


def test_codes_beyond_8_bits_come_back():
    method = VectorQuantization(codebook_size=65_536, dims=8)
    words = normal(1, 65_536, 8).half()
    codec = method.key_codec(64, torch.float32).restore({"codebooks": words})
    assert sum(field.bits for field in codec.fields[:2]) == 16
    chosen = torch.randint(65_536, (1, 1, 20, 8), generator=torch.Generator().manual_seed(1))
    arrays = {"low0": (chosen & 255).byte(), "high0": (chosen >> 8).byte(),
              "scale": torch.ones(1, 1, 20, 1, dtype=torch.float16)}  # fmt: skip
    assert torch.equal(codec.decode(arrays), words[0][chosen].flatten(-2).float())


def test_kmeans_finds_separate_clusters():
    generator = torch.Generator().manual_seed(0)
    centres = 100 * normal(20, 3)
    x = (centres.repeat(50, 1) + 0.1 * normal(1000, 3, seed=1))[torch.randperm(1000)]
    words = kmeans(x, 20, generator)
    assert (torch.cdist(centres, words).min(1).values < 0.2).all()
    assert torch.equal(nearest(centres, words), torch.cdist(centres, words).argmin(1))
