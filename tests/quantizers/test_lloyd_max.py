"""The codebooks, derived again from the normal density."""

import numpy as np
import pytest
import torch
from scipy.stats import norm

from kvpact.quantizers import lloyd_max

CPU = torch.device("cpu")
# Distortion of the optimal quantiser of N(0, 1) (Max 1960, table I), computed anew for 6 to 8 bits.
DISTORTION = {
    1: 0.363380,
    2: 0.117482,
    3: 0.034548,
    4: 0.009501,
    5: 0.002505,
    6: 0.000644,
    7: 0.0001635,
    8: 0.0000412,
}
ALL_BITS = sorted(DISTORTION)


def cells(bits: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the levels and the edges of their cells, from minus to plus infinity."""
    levels = lloyd_max.levels(bits, CPU).double().numpy()
    inner = lloyd_max.boundaries(bits, CPU).double().numpy()
    return levels, np.concatenate([[-np.inf], inner, [np.inf]])


@pytest.mark.parametrize("bits", ALL_BITS)
def test_each_level_is_the_mean_of_its_cell(bits):
    levels, edges = cells(bits)
    mass = norm.cdf(edges[1:]) - norm.cdf(edges[:-1])
    means = (norm.pdf(edges[:-1]) - norm.pdf(edges[1:])) / mass
    assert len(levels) == 2**bits
    np.testing.assert_allclose(levels, means, rtol=0, atol=1e-6)


@pytest.mark.parametrize("bits", ALL_BITS)
def test_boundaries_are_midpoints_and_the_codebook_is_symmetric(bits):
    levels, edges = cells(bits)
    np.testing.assert_allclose(edges[1:-1], (levels[1:] + levels[:-1]) / 2, rtol=0, atol=3e-7)
    np.testing.assert_array_equal(levels, -levels[::-1])
    assert (np.diff(levels) > 0).all()


@pytest.mark.parametrize("bits", ALL_BITS)
def test_distortion_on_the_normal_density(bits):
    levels, edges = cells(bits)
    mass = norm.cdf(edges[1:]) - norm.cdf(edges[:-1])
    first = norm.pdf(edges[:-1]) - norm.pdf(edges[1:])
    finite = np.where(np.isinf(edges), 0.0, edges)
    second = mass + finite[:-1] * norm.pdf(edges[:-1]) - finite[1:] * norm.pdf(edges[1:])
    error = (second - 2 * levels * first + levels**2 * mass).sum()
    assert error == pytest.approx(DISTORTION[bits], rel=2e-3 if bits > 5 else 3e-4)


@pytest.mark.parametrize("bits", ALL_BITS)
def test_assign_takes_the_nearest_level(bits):
    x = torch.randn(4096, generator=torch.Generator().manual_seed(bits)) * 1.5
    levels = lloyd_max.levels(bits, CPU)
    nearest = (x.double().unsqueeze(-1) - levels.double()).abs().amin(-1)
    codes = lloyd_max.assign(x, bits)
    assert codes.dtype == torch.uint8
    # Equal up to the rounding of a boundary to fp32.
    distance = (x.double() - lloyd_max.lookup(codes, bits).double()).abs()
    assert (distance - nearest).max() < 3e-7
    extremes = lloyd_max.assign(torch.tensor([-1e30, 1e30]), bits)
    assert extremes.tolist() == [0, 2**bits - 1]
