"""Rotations and sums of Triton tiles are those of torch, bit by bit."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

import triton
import triton.language as tl

from kvpact.arithmetic import saturated as saturated_by_torch
from kvpact.arithmetic import tree_sum as tree_sum_by_torch
from kvpact.kernels.triton.casts import saturated
from kvpact.kernels.triton.forms import LEAST_WIDTH, power_of_two
from kvpact.kernels.triton.transforms import rotated, rotated_back, tree_sum
from kvpact.transforms import RandomHadamard
from kvpact.transforms.hadamard import random_signs

ROWS = 4
WIDTHS = (1, 2, 3, 5, 8, 20, 32, 33, 63, 64, 80, 96, 100, 128, 576, 1000)


@triton.jit
def both_ways(X, SIGNS, FORWARD, BACK, ROWS: tl.constexpr, WIDTH: tl.constexpr, DIM: tl.constexpr):
    r, d = tl.arange(0, ROWS)[:, None], tl.arange(0, WIDTH)[None, :]
    x = tl.load(X + r * DIM + d, mask=d < DIM, other=0.0)
    place = r * WIDTH + d
    tl.store(FORWARD + place, rotated(x, SIGNS, ROWS, WIDTH, DIM))
    tl.store(BACK + place, rotated_back(x, SIGNS, ROWS, WIDTH, DIM))


@triton.jit
def sums(X, OUT, ROWS: tl.constexpr, WIDTH: tl.constexpr, DIM: tl.constexpr):
    r, d = tl.arange(0, ROWS), tl.arange(0, WIDTH)[None, :]
    x = tl.load(X + r[:, None] * DIM + d, mask=d < DIM, other=float("nan"))
    tl.store(OUT + r, tree_sum(x, ROWS, WIDTH, DIM))


@triton.jit
def casts(X, OUT, COUNT: tl.constexpr):
    i = tl.arange(0, COUNT)
    tl.store(OUT + i, saturated(tl.load(X + i), OUT.dtype.element_ty))


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    kind = torch.int32 if a.dtype == torch.float32 else torch.int16
    return torch.equal(a.contiguous().view(kind), b.contiguous().view(kind))


def random_rows(dim: int) -> torch.Tensor:
    return torch.randn(ROWS, dim, generator=torch.Generator().manual_seed(dim))


@pytest.mark.parametrize("dim", WIDTHS)
def test_random_hadamard(dim):
    x, width = random_rows(dim), max(power_of_two(dim), LEAST_WIDTH)
    rotation = RandomHadamard(dim, seed=dim)
    signs = random_signs(dim + rotation.block, dim, x.device)
    forward, back = torch.full((2, ROWS, width), torch.nan)
    both_ways[(1,)](x, signs, forward, back, ROWS, width, dim)
    assert same_bits(forward[:, :dim], rotation.forward(x))
    assert same_bits(back[:, :dim], rotation.inverse(x))
    assert not forward[:, dim:].any()


@pytest.mark.parametrize("dim", WIDTHS)
def test_tree_sum(dim):
    x = random_rows(dim) * 10.0 ** random_rows(dim).flip(1).mul(3).round()
    x[0] = -0.0  # the sum keeps its sign
    out = torch.full((ROWS,), torch.nan)
    sums[(1,)](x, out, ROWS, max(power_of_two(dim), LEAST_WIDTH), dim)
    assert same_bits(out, tree_sum_by_torch(x)[:, 0])


@pytest.mark.parametrize("dtype", (torch.float32, torch.float16, torch.bfloat16))
def test_casts_round_to_even(dtype):
    """Middles of neighbours and what is beside them, subnormal numbers, and what is beyond fp16."""
    bits = torch.randint(-(1 << 31), 1 << 31, (4096,), generator=torch.Generator().manual_seed(1))
    x = bits.to(torch.int32)
    x[::4] = x[::4] & -0x10000 | 0x8000
    x[1::4] = x[1::4] & -0x2000 | 0x1000
    x = x.view(torch.float32)
    x[2::4] = x[2::4].clamp(-1e5, 1e5)
    x[:8] = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, 65519.9, 65520.0, -65504.0, 6e-8])
    x = x.nan_to_num(nan=1.0, posinf=torch.inf, neginf=-torch.inf)
    out = torch.empty(4096, dtype=dtype)
    casts[(1,)](x, out, 4096)
    assert same_bits(out, saturated_by_torch(x, dtype))
    casts[(1,)](torch.full((4096,), torch.nan), out, 4096)
    assert out.isnan().all()
