"""PolarQuant against the densities of its angles, and against angles that are really computed."""

from functools import cache

import numpy as np
import pytest
import torch
from one_layer import normal
from scipy.integrate import quad
from scipy.stats import beta

from kvpact.methods import bytes_per_slot
from kvpact.methods.polarquant import PolarQuant, _assign, codebook

UPPER = range(2, 7)


def codec_of(dim: int, key: bool = True, **options):
    method = PolarQuant(**options)
    return (method.key_codec if key else method.value_codec)(dim, torch.float32)


@cache
def stored(dim: int, count: int = 20_000, **options) -> tuple[torch.Tensor, torch.Tensor]:
    """Return normal vectors `[T, D]` and what the codec makes of them."""
    x, codec = normal(1, 1, count, dim, seed=dim), codec_of(dim, **options)
    return x[0, 0], codec.transform.inverse(codec.decode(codec.encode(x)))[0, 0]


def distortion(dim: int, count: int = 20_000, **options) -> float:
    x, y = stored(dim, count, **options)
    return ((x - y).square().sum(-1) / x.square().sum(-1)).mean().item()


def angle_distribution(level: int, angle: np.ndarray) -> np.ndarray:
    """Return the distribution of `atan(s / r)`, r^2 and s^2 sums of 2^(l-1) squares: a Beta."""
    shape = 2 ** (level - 2)
    return beta(shape, shape).cdf(np.sin(angle) ** 2)


@pytest.mark.parametrize("level", UPPER)
def test_each_angle_is_the_mean_of_its_cell(level):
    angles, boundaries = (np.array(points) for points in codebook(level, 4))
    assert len(angles) == 4
    edges = np.array([0, *boundaries, np.pi / 2])
    mass = np.diff(angle_distribution(level, edges))
    for angle, low, high, share in zip(angles, edges[:-1], edges[1:], mass, strict=True):
        # The mean by parts: no density is needed.
        below = angle_distribution(level, np.array([low, high])) * [low, high]
        area = quad(lambda t: angle_distribution(level, t), low, high, epsabs=1e-11)[0]
        assert (below[1] - below[0] - area) / share == pytest.approx(angle, abs=1e-6)
    np.testing.assert_allclose(boundaries, (angles[1:] + angles[:-1]) / 2, rtol=0, atol=1e-12)
    np.testing.assert_allclose(angles + angles[::-1], np.pi / 2, rtol=0, atol=1e-12)


@pytest.mark.parametrize("first", range(1, 9))
def test_level_1_has_equal_sectors(first):
    angles, boundaries = (np.array(points) for points in codebook(1, first))
    width = 2 * np.pi / 2**first
    np.testing.assert_allclose(angles, width * (np.arange(2**first) + 0.5))
    np.testing.assert_allclose(boundaries, width * np.arange(1, 2**first))


def computed_angles(rotated: np.ndarray, levels: int) -> list[np.ndarray]:
    """Return the angles of each level in double precision, with an arc tangent."""
    angles, nodes = [], rotated
    for level in range(levels):
        nodes = nodes[..., : nodes.shape[-1] // 2 * 2].reshape(*nodes.shape[:-1], -1, 2)
        angle = np.arctan2(nodes[..., 1], nodes[..., 0])
        angles.append(angle % (2 * np.pi) if level == 0 else angle)
        nodes = np.hypot(nodes[..., 0], nodes[..., 1])
    return angles


@pytest.mark.parametrize(
    ("dim", "levels", "first"), [(64, 6, 4), (128, 4, 1), (80, 4, 2), (72, 5, 8)]
)
def test_codes_are_those_of_the_computed_angles(dim, levels, first):
    codec, x = codec_of(dim, levels=levels, first=first), normal(1, 1, 4096, dim, seed=3)
    arrays = codec.encode(x)
    rotated = codec.transform.forward(x).double().numpy()
    for level, angles in enumerate(computed_angles(rotated, levels), 1):
        boundaries = np.array(codebook(level, first)[1])
        wanted, got = np.searchsorted(boundaries, angles), arrays[f"angles{level}"].numpy()
        assert got.shape == wanted.shape
        # Where they differ, the angle is at a boundary (or at 0, which is 2 pi) up to rounding.
        edges = np.concatenate([[0, 2 * np.pi], boundaries])
        distance = np.abs(angles[got != wanted][..., None] - edges).min(-1)
        assert distance.size <= 3 and (distance < 1e-6).all()


@pytest.mark.parametrize("dim", [64, 80, 96, 128])
def test_distortion_and_bits_of_the_papers_preset(dim):
    assert distortion(dim) == pytest.approx(0.0321, rel=0.01)
    for key in (True, False):
        assert bytes_per_slot(codec_of(dim, key)) * 8 / dim == 3.875
    x, y = stored(dim)
    assert ((x * y).sum() / x.square().sum()).item() == pytest.approx(0.984, abs=0.001)


# Levels and bits of the first: bits per value at D = 128, and the distortion.
@pytest.mark.parametrize(("levels", "first", "bits", "wanted"), [
    (1, 4, 10, 0.0129), (2, 4, 6.5, 0.0227), (3, 4, 4.75, 0.0287), (5, 4, 3.4375, 0.0338),
    (6, 4, 3.21875, 0.0347), (4, 3, 3.375, 0.0693), (4, 5, 4.375, 0.0226),
])  # fmt: skip
def test_what_levels_and_the_first_bits_cost(levels, first, bits, wanted):
    assert bytes_per_slot(codec_of(128, levels=levels, first=first)) * 8 / 128 == bits
    assert distortion(128, 8192, levels=levels, first=first) == pytest.approx(wanted, rel=0.02)


@pytest.mark.parametrize("dim", [*range(1, 34), 40, 72, 100, 127, 200])
def test_any_width_stores_what_has_no_partner(dim):
    bits, nodes = 0, dim
    for width in (4, 2, 2, 2):
        bits += nodes // 2 * width + nodes % 2 * 16
        nodes //= 2
    for key in (True, False):
        codec = codec_of(dim, key)
        assert bytes_per_slot(codec) * 8 == bits + nodes * 16
    x = normal(1, 1, 2048, dim, seed=dim)
    arrays = codec.encode(x)
    assert set(arrays) == {field.name for field in codec.fields}
    y = codec.transform.inverse(codec.decode(arrays))
    # Exact channels and fewer levels make it better, never worse.
    assert (x - y).square().sum() / x.square().sum() < 0.033


def test_values_are_coded_as_keys_are():
    x = normal(2, 3, 40, 96)
    keys, values = (codec_of(96, key).encode(x) for key in (True, False))
    assert all(torch.equal(keys[name], values[name]) for name in keys)


# Points exactly on the boundaries of 16 sectors, and their codes: a boundary belongs to the sector
# below it, but for the axes, whose cosine or sine is not quite 0.
@pytest.mark.parametrize(("x", "y", "code"), [
    (1, 0, 0), (1, -0.0, 0), (1, 1, 1), (0, 1, 4), (-0.0, 1, 4), (-1, 1, 5), (-1, 0, 7),
    (-1, -0.0, 7), (-1, -1, 9), (0, -1, 12), (1, -1, 13), (0, 0, 0),
])  # fmt: skip
def test_points_on_boundaries_have_one_code(x, y, code):
    for size in (1e-20, 1, 3, 1e15):
        # In the body and in the tail of a vectorised loop.
        points = torch.tensor([x, y]).float().mul(size).repeat(67, 1)
        assert _assign(points[:, 0], points[:, 1], 1, 4).unique().tolist() == [code]
