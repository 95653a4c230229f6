"""QJL against its formula with dense matrices, its distortion, and that it is right on average."""

from functools import cache

import pytest
import torch
from one_layer import unit_vectors

import kvpact
from kvpact.errors import SpecError
from kvpact.methods.kivi import KIVI
from kvpact.methods.qjl import QJL
from kvpact.transforms import RandomHadamard


def stored(x: torch.Tensor, **options) -> torch.Tensor:
    """Return keys `[T, D]` as the codec stores them, rotated back."""
    codec = QJL(**options).key_codec(x.shape[-1], torch.float32)
    return codec.transform.inverse(codec.decode(codec.encode(x[None, None])))[0, 0]


@cache
def stored_units(dim: int, sketch: int) -> torch.Tensor:
    return stored(unit_vectors(dim), sketch=sketch)


# |x - x^|^2 / |x|^2 of one sketch is pi / 2 - 1; further sketches average it out.
DISTORTION = {
    (64, 1): 0.564, (64, 2): 0.282, (64, 3): 0.187, (64, 4): 0.140,
    (128, 1): 0.567, (128, 2): 0.283, (128, 3): 0.189, (128, 4): 0.141,
    (80, 1): 0.565, (80, 2): 0.282,
}  # fmt: skip


@pytest.mark.parametrize(("dim", "sketch"), DISTORTION)
def test_distortion_is_that_of_an_orthonormal_sketch(dim, sketch):
    error = (unit_vectors(dim) - stored_units(dim, sketch)).square().sum(-1).mean().item()
    assert error == pytest.approx(DISTORTION[dim, sketch], rel=0.02)


@pytest.mark.parametrize(("dim", "sketch"), DISTORTION)
def test_products_with_exact_queries_are_right_on_average(dim, sketch):
    queries = unit_vectors(dim, seed=1, count=100)
    exact, estimate = queries @ unit_vectors(dim).T, queries @ stored_units(dim, sketch).T
    assert ((exact * estimate).sum() / exact.square().sum()).item() == pytest.approx(1, abs=0.01)
    variance = dim * (exact - estimate).square().mean().item()
    assert variance == pytest.approx(DISTORTION[dim, sketch], rel=0.03)


@pytest.mark.parametrize("dim", [64, 80, 128])
@pytest.mark.parametrize("sketch", [1, 3])
def test_a_key_in_one_channel_is_estimated_without_bias_too(dim, sketch):
    # After a single Hadamard transform it would come back 1.25 times as long, whatever the seed.
    x = torch.eye(dim)
    lengths = [stored(x, sketch=sketch, seed=seed).diagonal().mean() for seed in range(40)]
    assert torch.stack(lengths).mean().item() == pytest.approx(1, abs=0.02)


def dense_blocks(dim: int, sketch: int, seed: int) -> list[torch.Tensor]:
    """Return the blocks of S as matrices."""
    eye = torch.eye(dim)
    turns = [RandomHadamard(dim, seed + i).forward(eye).T for i in range(sketch + 1)]
    rotation = turns[1] @ turns[0]
    return [rotation, *(turn @ rotation for turn in turns[2:])]


@pytest.mark.parametrize("dim", [48, 64])
@pytest.mark.parametrize("sketch", [1, 2, 4])
def test_formula_of_the_paper_with_dense_matrices(dim, sketch):
    codec = QJL(sketch=sketch, seed=5).key_codec(dim, torch.float32)
    x = 3 * torch.randn(1, 1, 500, dim, generator=torch.Generator().manual_seed(dim))
    dense = torch.cat(dense_blocks(dim, sketch, 5)).double()
    arrays = codec.encode(x)
    projected = x.double() @ dense.T
    signs = arrays["signs"].double() * 2 - 1
    assert (signs == projected.sign()).logical_or(projected.abs() < 1e-4).all()
    norm = x.double().norm(dim=-1, keepdim=True)
    wanted = (torch.pi / 2 / dim) ** 0.5 * norm * (signs @ dense) / sketch
    got = codec.transform.inverse(codec.decode(arrays)).double()
    torch.testing.assert_close(got, wanted, atol=2e-3, rtol=1e-3)


@pytest.mark.parametrize(("bits", "group"), [(2, 32), (4, 64)])
def test_values_are_those_of_kivi(bits, group):
    v = torch.randn(2, 3, 40, 96, generator=torch.Generator().manual_seed(2))
    ours = QJL(value_bits=bits, value_group=group).value_codec(96, torch.float32)
    kivi = KIVI(bits=bits, group=group).value_codec(96, torch.float32)
    assert ours.fields == kivi.fields
    theirs = kivi.encode(v)
    assert all(torch.equal(array, theirs[name]) for name, array in ours.encode(v).items())


def test_the_sketch_means_nothing_for_values():
    with pytest.raises(SpecError, match="'sketch' applies to K only"):
        kvpact.parse_spec("int:bits=8/qjl:sketch=3")
    text = "qjl:sketch=3/qjl:value_bits=4"
    assert str(kvpact.parse_spec(text)) == text
