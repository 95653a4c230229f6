"""Hadamard transform, random signs, arithmetic that is the same everywhere."""

import numpy as np
import pytest
import torch
from one_layer import normal
from scipy.linalg import hadamard as sylvester

from kvpact.arithmetic import divide, hadamard, tree_sum
from kvpact.transforms import RandomHadamard
from kvpact.transforms.hadamard import random_signs

DIMS = (1, 2, 3, 7, 64, 80, 96, 128, 160, 192, 224, 288, 576)
CPU = torch.device("cpu")


@pytest.mark.parametrize("n", [1, 2, 4, 8, 64, 128, 256, 512])
def test_hadamard_is_sylvesters_matrix_over_sqrt_n(n):
    x = normal(5, 3, n)
    wanted = x.double().numpy() @ (sylvester(n) / np.sqrt(n))
    np.testing.assert_allclose(hadamard(x).numpy(), wanted, rtol=0, atol=2e-6)
    np.testing.assert_allclose(hadamard(hadamard(x)).numpy(), x.numpy(), rtol=0, atol=2e-6)


@pytest.mark.parametrize("n", [3, 80, 96])
def test_hadamard_refuses_what_is_no_power_of_two(n):
    with pytest.raises(ValueError, match=f"power of two, not {n}"):
        hadamard(torch.ones(2, n))


@pytest.mark.parametrize("dim", DIMS)
def test_rotation_is_orthogonal(dim):
    rotation = RandomHadamard(dim, seed=3)
    matrix = rotation.forward(torch.eye(dim)).double()
    assert torch.allclose(matrix @ matrix.T, torch.eye(dim, dtype=torch.double), atol=1e-6)
    assert torch.allclose(rotation.inverse(torch.eye(dim)).double(), matrix.T, atol=1e-6)


@pytest.mark.parametrize("dim", [dim for dim in DIMS if dim >= 64])
def test_a_constant_vector_spreads_over_all_coordinates(dim):
    # Without signs before it, the transform would put all of it into one coordinate.
    for seed in range(5):
        y = RandomHadamard(dim, seed).forward(torch.ones(dim))
        share = y.square() / dim
        assert share.sum() == pytest.approx(1, abs=1e-5)
        # dim normal numbers: the largest square of 576 is about 13 times the mean, 25 once in
        # 2,000.
        assert share.max() < 25 / dim
        # No part of the vector is left out (in any eighth: 1/8 expected).
        for part in share.chunk(8):
            assert part.sum() > 1 / 40


@pytest.mark.parametrize("dim", [dim for dim in DIMS if dim >= 64])
def test_every_channel_spreads_over_at_least_half_of_the_vector(dim):
    shares = RandomHadamard(dim).forward(torch.eye(dim)).square()
    assert (shares > 0).float().mean(-1).min() > 0.5
    # A power of two: exactly even. Else the blocks overlap, and a sixteenth may stay together.
    assert shares.max() < (0.12 if dim & (dim - 1) else 1 / dim + 1e-6)


FIRST_SIGNS = {0: "+--+-+++-++-+--+", 1: "+-+++-++++-+--+-", 12345: "--+--+---+-+++-+"}


@pytest.mark.parametrize("seed", FIRST_SIGNS)
def test_signs_are_a_function_of_the_seed(seed):
    signs = random_signs(16, seed, CPU)
    assert signs.dtype == torch.float32
    assert "".join("+" if sign > 0 else "-" for sign in signs) == FIRST_SIGNS[seed]
    # More signs begin with the same.
    assert torch.equal(random_signs(700, seed, CPU)[:16], signs)


def test_signs_are_balanced_and_independent():
    signs = torch.stack([random_signs(1024, seed, CPU) for seed in range(64)])
    assert set(signs.unique().tolist()) == {-1.0, 1.0}
    # 1024 signs have a standard deviation of 1/32; of 64 means and 63 products none beyond 5.
    assert signs.mean(-1).abs().max() < 5 / 32
    assert (signs[1:] * signs[:-1]).mean(-1).abs().max() < 5 / 32
    assert (signs[:, 1:] * signs[:, :-1]).mean(-1).abs().max() < 5 / 32


@pytest.mark.parametrize("size", [1, 2, 3, 5, 7, 31, 64, 80, 127, 128, 576])
def test_tree_sum_is_the_sum(size):
    for dim in (0, 1, -1):
        shape = [4, 5, 6]
        shape[dim] = size
        x = normal(*shape, seed=size)
        total = tree_sum(x, dim)
        wanted = x.double().numpy().sum(axis=dim, keepdims=True)
        assert total.shape == wanted.shape
        # Pairwise: the error grows with log2 of the size alone.
        bound = np.abs(x.numpy()).sum(axis=dim, keepdims=True) * 2e-7 * np.log2(size + 1)
        assert (np.abs(total.double().numpy() - wanted) <= bound).all()


def test_tree_sum_of_nothing_is_zero():
    assert torch.equal(tree_sum(torch.ones(3, 0, 2), 1), torch.zeros(3, 1, 2))


@pytest.mark.parametrize("dim", [7, 64, 80, 128, 576])
def test_results_do_not_depend_on_what_else_is_in_the_batch(dim):
    x = normal(3, 41, dim, seed=dim)
    rotation = RandomHadamard(dim)
    whole, summed = rotation.forward(x), tree_sum(x)
    back = rotation.inverse(x)
    for index in ((0, 0), (1, 17), (2, 40)):
        one = x[index]
        assert torch.equal(rotation.forward(one), whole[index])
        assert torch.equal(rotation.forward(one.expand(9, 1, dim))[4, 0], whole[index])
        assert torch.equal(rotation.inverse(one), back[index])
        assert torch.equal(tree_sum(one), summed[index])
    across = x.transpose(0, 1)
    assert not across.is_contiguous()
    assert torch.equal(rotation.forward(across), whole.transpose(0, 1))
    assert torch.equal(tree_sum(across), summed.transpose(0, 1))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_rotation_computes_in_fp32(dtype):
    x = normal(4, 64).to(dtype)
    rotation = RandomHadamard(64)
    assert rotation.forward(x).dtype == torch.float32
    assert torch.equal(rotation.forward(x), rotation.forward(x.float()))
    assert torch.equal(rotation.inverse(x), rotation.inverse(x.float()))


@pytest.mark.parametrize("number", [3, 12, 80, 127, 448.0, 57344.0, 128**0.5])
def test_divisions_are_correctly_rounded(number):
    x = normal(4096, seed=3)
    wanted = x.numpy() / np.float32(number)
    np.testing.assert_array_equal(divide(x, number).numpy(), wanted)
    assert divide(x.to("meta"), number).is_meta
