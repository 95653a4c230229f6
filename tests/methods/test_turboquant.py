"""TurboQuant against its theory and against faiss, on unit vectors; the pure codec alone."""

from functools import cache

import faiss
import pytest
import torch
from one_layer import unit_vectors

from kvpact.errors import NonFiniteError
from kvpact.methods.turboquant import TurboQuant
from kvpact.transforms import RandomHadamard

PAPER = {1: 0.3634, 2: 0.1175, 3: 0.0345, 4: 0.0095}
DIMS = (64, 128)


def stored(x: torch.Tensor, key: bool = True, **options) -> torch.Tensor:
    """Return vectors `[T, D]` as the codec stores them, rotated back."""
    method = TurboQuant(sinks=0, window=0, **options)
    codec = (method.key_codec if key else method.value_codec)(x.shape[-1], torch.float32)
    return codec.transform.inverse(codec.decode(codec.encode(x[None, None])))[0, 0]


@cache
def stored_units(dim: int, **options) -> torch.Tensor:
    return stored(unit_vectors(dim), **options)


def distortion(x: torch.Tensor, y: torch.Tensor) -> float:
    return (x - y).square().sum(-1).double().mean().item()


def products(dim: int, estimate: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return <y, x> and <y, estimate of x> for unit queries y that know nothing of x."""
    queries = unit_vectors(dim, seed=1, count=100)
    return queries @ unit_vectors(dim).T, queries @ estimate.T


def slope(dim: int, estimate: torch.Tensor) -> float:
    exact, estimated = products(dim, estimate)
    return ((exact * estimated).sum() / exact.square().sum()).item()


@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("bits", PAPER)
def test_least_squares_scale_reaches_the_papers_distortion(dim, bits):
    error = distortion(unit_vectors(dim), stored_units(dim, bits=bits))
    assert 0.9 * PAPER[bits] < error <= 1.03 * PAPER[bits]


@pytest.mark.parametrize("options", [{}, {"mode": "prod"}, {"center": 64}])
def test_values_are_stored_as_mse_and_differ_from_keys_in_the_packing_alone(options):
    x = unit_vectors(64)[:1024]
    assert torch.equal(stored(x, False, bits=3, **options), stored(x, True, bits=3))


@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("bits", PAPER)
def test_l2_scale_has_the_distortion_of_faiss(dim, bits):
    # faiss quantises the coordinates of unit vectors as they are given, without a rotation and
    # without a norm. Both get the same coordinates: faiss the rotated vectors, we the plain ones.
    x = unit_vectors(dim)
    rotated = RandomHadamard(dim).forward(x)
    index = faiss.index_factory(dim, f"SQtqmse{bits}")
    index.train(rotated.numpy())
    peer = torch.from_numpy(index.sa_decode(index.sa_encode(rotated.numpy())))
    ours = stored_units(dim, bits=bits, scale="l2")
    assert distortion(x, ours) == pytest.approx(distortion(rotated, peer), rel=1e-3)
    # The same levels, to half a unit (.0131), but for coordinates next to a boundary.
    apart = (RandomHadamard(dim).forward(ours) - peer).abs() * dim**0.5
    assert apart.gt(0.02).float().mean() < (0.008 if bits == 4 else 0.001)


@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("bits", PAPER)
def test_scales_trade_distortion_for_unbiased_products(dim, bits):
    x = unit_vectors(dim)
    errors = {s: distortion(x, stored_units(dim, bits=bits, scale=s)) for s in ("ls", "l2")}
    unbiased = stored_units(dim, bits=bits, scale="unbiased")
    assert errors["ls"] < errors["l2"] and errors["ls"] < distortion(x, unbiased)
    assert slope(dim, unbiased) == pytest.approx(1.0, abs=0.01)
    # Least squares shrinks by exactly what it does not explain.
    shrunk = slope(dim, stored_units(dim, bits=bits))
    assert shrunk == pytest.approx(1 - errors["ls"], abs=0.005)


# D * E (<y, x^> - <y, x>)^2 with an orthonormal sketch (the paper's Gaussian one: 2.8 times that).
PRODUCT_VARIANCE = {
    (64, 2): 0.201, (64, 3): 0.0644, (64, 4): 0.0187,
    (128, 2): 0.205, (128, 3): 0.0657, (128, 4): 0.0192,
}  # fmt: skip


@pytest.mark.parametrize(
    ("dim", "bits", "scale"),
    [(dim, bits, "ls") for dim, bits in PRODUCT_VARIANCE] + [(64, 2, "l2"), (64, 3, "l2")],
)
def test_prod_is_unbiased_and_has_the_variance_of_an_orthonormal_sketch(dim, bits, scale):
    estimate = stored_units(dim, bits=bits, mode="prod", scale=scale)
    assert slope(dim, estimate) == pytest.approx(1.0, abs=0.01)
    exact, estimated = products(dim, estimate)
    variance = dim * (exact - estimated).square().mean().item()
    assert variance == pytest.approx(PRODUCT_VARIANCE[dim, bits], rel=0.05)


# Bits to (error with center=0, with center=64), in units of the noise: the codebook's share of
# 1 + 9 (noise and offset), and of 1 less what the mean of 64 tokens explains.
@pytest.mark.parametrize(
    ("bits", "plain", "centered"),
    [(2, 1.13, 0.1115), (3, 0.325, 0.0320), (4, 0.0886, 0.00872)],
)
def test_center_takes_a_constant_offset_of_the_channels_out(bits, plain, centered):
    generator = torch.Generator().manual_seed(5)
    offset = torch.randn(256, 1, 64, generator=generator)
    offset *= 3 / offset.square().mean(-1, keepdim=True).sqrt()
    x = torch.randn(256, 128, 64, generator=generator) + offset

    def error(**options) -> float:
        codec = TurboQuant(bits=bits, **options).key_codec(64, torch.float32)
        rows = x.view(1, *x.shape)
        y = codec.transform.inverse(codec.decode(codec.encode(rows)))
        return (y - rows).square().mean().item()

    assert error() == pytest.approx(plain, rel=0.03)
    assert error(center=64) == pytest.approx(centered, rel=0.03)
    # A tile twice as long leaves a little more of the noise in.
    assert error(center=64) < error(center=128) < 1.03 * error(center=64)


@pytest.mark.parametrize("key", [True, False])
@pytest.mark.parametrize("number", [1e6, 1e19, 3e19, 1e30, 3e38])
def test_no_magnitude_is_stored_as_zero(number, key):
    x = torch.randn(4, 64, generator=torch.Generator().manual_seed(9))
    x[2, 3] = number
    with pytest.raises(NonFiniteError, match="of a token"):
        stored(x, key=key, bits=4)
