"""The native scan of an index's packed keys gives the torch body's scores."""

import pytest
import torch
from hypothesis import strategies as st
from random_cases import random_cases
from simd_levels import at_level, levels

from kvpact.kernels.cpu.index import covers, scan
from kvpact.kernels.cpu.library import _load
from kvpact.kernels.index import index_scores, torch_scores
from kvpact.quantizers.channels import to_integers

native = pytest.mark.skipif(isinstance(_load(), str), reason=f"native kernels: {_load()}")
BOUND = 1e-4
"""Of the largest score: queries are rounded to 16 bits."""


def given(batch, groups, width, queries, heads, seed=0):
    generator = torch.Generator().manual_seed(seed)
    keys = torch.randn(batch, groups * 64, width, generator=generator)
    keys *= torch.rand(width, generator=generator) * 9
    q = torch.randn(batch, queries, heads, width, generator=generator)
    return *to_integers(keys, 1, 0), q, torch.randn(batch, queries, heads, generator=generator)


def scanned(codes, scale, q, weight):
    """Return what the kernel writes into NaN, with NaN behind it."""
    shape = (*q.shape[: 2 if weight is not None else 3], codes.shape[1] + 5)
    out = torch.full(shape, torch.nan)
    scan(codes, scale, q, weight, out)
    assert out[..., codes.shape[1] :].isnan().all()
    return out[..., : codes.shape[1]]


def compare(codes, scale, q, weight):
    for given_weight in (weight, None):
        wanted = torch_scores(codes, scale, q, given_weight)
        got = scanned(codes, scale, q, given_weight)
        assert (got - wanted).abs().max() <= BOUND * q.shape[2] ** 0.5 * wanted.abs().max()


@native
@pytest.mark.parametrize("level", levels())
def test_odd_shapes_at_every_level(level):
    with at_level(level):
        for shape in ((1, 1, 32, 1, 1), (2, 3, 96, 2, 5), (3, 17, 128, 1, 64), (1, 2, 1024, 8, 9)):
            compare(*given(*shape))


@native
@random_cases(
    20,
    st.integers(1, 3),
    st.integers(1, 40),
    st.sampled_from((32, 64, 160)),
    st.integers(1, 3),
    st.integers(1, 19),
    st.integers(0, 2**32),
)
def test_any_shape(batch, groups, width, queries, heads, seed):
    compare(*given(batch, groups, width, queries, heads, seed))


@native
def test_queries_of_zeros_and_tiny_ones():
    codes, scale, q, weight = given(1, 2, 64, 1, 3)
    q[:, :, 0] = 0
    q[:, :, 1] *= 1e-12
    assert not scanned(codes, scale, q, None)[:, :, 0].any()
    compare(codes, scale, q[:, :, 1:2], weight[:, :, 1:2])


@native
def test_threads_change_nothing(set_threads):
    made, found = given(2, 50, 64, 2, 8), []
    for threads in (1, 3):
        set_threads(threads)
        found.append(scanned(*made))
    assert torch.equal(*found)


def test_the_torch_body_where_the_kernel_is_not_asked_or_does_not_cover():
    codes, scale, q, weight = given(1, 2, 33, 1, 3)
    assert not covers(codes, scale, q)
    wanted = torch_scores(codes, scale, q, weight)
    assert torch.equal(index_scores(codes, scale, q, weight), wanted)
    codes, scale, q, weight = given(1, 2, 64, 1, 3)
    wanted = torch_scores(codes, scale, q, weight)
    assert torch.equal(index_scores(codes, scale, q, weight, "torch"), wanted)
    keys = scale.repeat_interleave(64, 1) * codes
    by_hand = sum(weight[0, 0, h] * (keys[0] @ q[0, 0, h]).relu() for h in range(3))
    assert torch.allclose(wanted[0, 0], by_hand, atol=1e-4)
