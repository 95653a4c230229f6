"""The codebooks, derived again from the normal density."""

import numpy as np
import pytest
import torch
from scipy.integrate import quad
from scipy.stats import norm

from kvpact.quantizers import codebooks

CPU = torch.device("cpu")
# Distortion of the optimal quantiser of N(0, 1) (Max 1960, table I), computed anew to 8 digits,
# and by how much of it the codebook's is larger.
DISTORTION = {
    1: (0.36338023, 3e-8), 2: (0.11748185, 7e-7), 3: (0.034547761, 2.37e-5),
    4: (0.0095010080, 5.48e-4), 5: (0.0025046684, 5.79e-3), 6: (0.00064423967, 1.932e-2),
    7: (0.00016347823, 0), 8: (0.000041185083, 0),
}  # fmt: skip
ALL_BITS = sorted(DISTORTION)


def cells(bits: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the levels and the edges of their cells, from minus to plus infinity."""
    levels = codebooks.levels(bits, CPU).double().numpy()
    inner = codebooks.boundaries(bits, CPU).double().numpy()
    return levels, np.concatenate([[-np.inf], inner, [np.inf]])


def distortion(bits: int) -> float:
    """Return E (x - level)^2, integrated numerically, cell by cell."""
    levels, edges = cells(bits)

    def error(x: float, level: float) -> float:
        return (x - level) ** 2 * norm.pdf(x)

    half = len(levels) // 2
    upper = zip(levels[half:], edges[half:], edges[half + 1 :], strict=False)
    return 2 * sum(quad(error, low, min(high, 12.0), (level,))[0] for level, low, high in upper)


@pytest.mark.parametrize("bits", ALL_BITS[:6])
def test_levels_are_whole_numbers_of_8_bits_and_exact(bits):
    levels, unit = codebooks.codebook(bits)
    assert all(level == int(level) and 1 <= abs(level) <= 127 for level in levels)
    assert len(set(levels)) == 2**bits
    assert float(np.float16(unit)) == unit
    exact = np.array(levels) * unit  # in fp64, where nothing is rounded
    stored, edges = cells(bits)
    np.testing.assert_array_equal(stored, exact)
    np.testing.assert_array_equal(edges[1:-1], (exact[1:] + exact[:-1]) / 2)


@pytest.mark.parametrize("bits", ALL_BITS)
def test_boundaries_are_midpoints_and_the_codebook_is_symmetric(bits):
    levels, edges = cells(bits)
    assert len(levels) == 2**bits
    np.testing.assert_allclose(edges[1:-1], (levels[1:] + levels[:-1]) / 2, rtol=0, atol=3e-7)
    np.testing.assert_array_equal(levels, -levels[::-1])
    assert (np.diff(levels) > 0).all()


@pytest.mark.parametrize("bits", ALL_BITS)
def test_distortion_on_the_normal_density(bits):
    least, share = DISTORTION[bits]
    assert distortion(bits) / least - 1 == pytest.approx(share, rel=0.02, abs=5e-8)


@pytest.mark.parametrize("bits", ALL_BITS)
def test_assign_takes_the_nearest_level(bits):
    x = torch.randn(4096, generator=torch.Generator().manual_seed(bits)) * 1.5
    levels = codebooks.levels(bits, CPU)
    nearest = (x.double().unsqueeze(-1) - levels.double()).abs().amin(-1)
    codes = codebooks.assign(x, bits)
    assert codes.dtype == torch.uint8
    # Equal up to the rounding of a boundary to fp32.
    distance = (x.double() - codebooks.lookup(codes, bits).double()).abs()
    assert (distance - nearest).max() < 3e-7
    extremes = codebooks.assign(torch.tensor([-1e30, 1e30]), bits)
    assert extremes.tolist() == [0, 2**bits - 1]
