"""The Viterbi algorithm of kernels finds the codes of `quantizers.trellis`."""

from dataclasses import dataclass

import pytest
import torch

pytest.importorskip("triton")

import triton
import triton.language as tl

from kvpact.kernels.triton.encode.viterbi import viterbi
from kvpact.kernels.triton.trellis.steps import Plane, TrellisSteps
from kvpact.quantizers import trellis


@dataclass(frozen=True)
class One:
    """A form of one block."""

    steps: tuple[TrellisSteps, ...]


@triton.jit
def encode(numbers, back, codes, cells, FORM: tl.constexpr):
    """Encode 32 vectors, of which the last one is empty."""
    lane = tl.arange(0, 32)
    viterbi(numbers, back, codes, lane * 0.0 + 1.0, lane == 31, cells, FORM, 0)


def codes_of(z: torch.Tensor, bits: int, states: int) -> torch.Tensor:
    """Return the kernel's codes of `[32, D]` numbers."""
    block = TrellisSteps(
        0, z.shape[1], bits, states.bit_length() - 1, 0, 1, Plane(), Plane(), 0, trellis.UNITS[bits]
    )
    codes = torch.full((z.shape[1], 32), 255, dtype=torch.uint8)
    back = torch.empty(z.shape[1], 32, dtype=torch.int16)
    encode[(1,)](z.mT.contiguous(), back, codes, trellis.cells(bits), One((block,)))
    return codes.mT


@pytest.mark.parametrize(
    ("dim", "bits", "states"),
    ((64, 4, 16), (33, 6, 16), (32, 1, 16), (40, 2, 8), (16, 5, 8), (8, 3, 8)),
)
def test_codes(dim, bits, states):
    z = torch.randn(32, dim, generator=torch.Generator().manual_seed(bits)) / trellis.UNITS[bits]
    z[0] = (z[0] * 2).round() / 2  # the middles of points: ties
    z[1, :6] = torch.tensor([1e4, -1e4, 128.0, -128.0, 0.0, -0.0])
    z[2] = 0  # ties everywhere
    z[3, :4] = torch.tensor([1e-45, -1e-45, 1e-39, -1e-39])
    expected = trellis.encode(z, bits, states)
    expected[31] = 0
    assert torch.equal(codes_of(z, bits, states), expected)


@pytest.mark.parametrize("bits", range(1, 7))
def test_cells_tell_the_nearest_points(bits):
    z = torch.linspace(-140, 140, 20_001)
    z = torch.cat([z, (z * 2).round() / 2])
    points = trellis.nearest_points(z.view(-1, 1), bits)[:, :, 0]
    cell = (2 * z).clamp(-trellis.CELLS, trellis.CELLS).ceil().long() + trellis.CELLS
    found = trellis.cells(bits)[1, cell].view(-1, 1) >> torch.arange(0, 32, 8) & 0xFF
    assert torch.equal(found.to(torch.uint8), points)
