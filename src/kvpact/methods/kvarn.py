"""KVarN: variance balancing on both axes of a tile, then round to nearest (arXiv:2606.03458).

A tile of `group` tokens is rotated (random signs, Hadamard), then divided by a scale per row and a
scale per column until all rows and all columns have about the same standard deviation. This takes
SWEEPS rounds of Sinkhorn's alternation, of which the most even one is kept. Rows are the channels
for K and the tokens for V. Each row is rounded on a grid between its minimum and maximum:
`x ~ (zero[row] + scale[row] * code) * balance[column]`, all three fp16, where scale and zero
include the row's own balance.

The tile's overall deviation is divided out first, so that the limits on the scales mean the same
for data of any magnitude. In tiles of K with numbers below 1 the balance holds the magnitude and
the grid is of order 1: a rollback may cut such a tile, and then tokens of any size are coded on its
grid.

Bits per value: bits + 32/group + 16/D for K, bits + 32/D + 16/group for V. The paper's settings are
``kvarn:bits=2`` to ``kvarn:bits=4`` with groups of 64 or 128, and 4 bits for K with 2 for V.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kvpact.arithmetic import divide, square_root, tree_sum
from kvpact.formats import Order
from kvpact.formats.form import Form, Levels, Side
from kvpact.methods.base import Arrays, Codec, Method
from kvpact.methods.rules import FormCodec, rule
from kvpact.quantizers import uniform
from kvpact.quantizers.numbers import half
from kvpact.transforms import RandomHadamard

SWEEPS = 16
SCALE_MIN, SCALE_MAX = 0.740818, 22026.47  # exp(-0.3), exp(10): the reference's limits
STD_MIN, STD_MAX = 1e-3, 1e3
LONGEST = 48_000.0  # over SCALE_MIN it is within fp16, hence scale and zero of every row are
UNIT_MIN = 2.0**-20  # tiles of K below it are stored as zeros


def _std(x: Tensor, dim: int) -> Tensor:
    count = x.shape[dim]
    mean = divide(tree_sum(x, dim), count)
    return square_root(divide(tree_sum((x - mean).square(), dim), count))


def _spread(std: Tensor, dim: int) -> Tensor:
    std = std.clamp(STD_MIN, STD_MAX)
    return std.amax(dim, keepdim=True) / std.amin(dim, keepdim=True)


def balance(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return scales of `[..., rows, columns]` that even out deviations of rows and columns."""
    whole = _std(x.flatten(-2), -1).unsqueeze(-1)
    whole = torch.where(whole == 0, torch.ones_like(whole), whole)
    x = x / whole
    column, row = torch.ones_like(x[..., :1, :]), torch.ones_like(x[..., :, :1])
    best_column, best_row = column, row
    current, best = x, torch.full_like(whole, torch.inf)
    for _ in range(SWEEPS):
        step = _std(current, -2).clamp(STD_MIN, STD_MAX)
        column = (column * step).clamp(SCALE_MIN, SCALE_MAX)
        step = _std(x / column / row, -1).clamp(STD_MIN, STD_MAX)
        row = (row * step).clamp(SCALE_MIN, SCALE_MAX)
        current = x / column / row
        uneven = _spread(_std(current, -2), -1) + _spread(_std(current, -1), -2)
        better = uneven < best
        best = torch.where(better, uneven, best)
        best_column = torch.where(better, column, best_column)
        best_row = torch.where(better, row, best_row)
    return best_row * whole, best_column


def _rounded_rows(
    x: Tensor, bits: int, unit: Tensor | float = 1.0
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return codes, scale, zero and column balance (times `unit`) of `[..., rows, columns]`."""
    row, column = balance(x)
    row, column = row / unit, half(column * unit, "balance")
    balanced = x / column.to(torch.float32)
    low, high = (balanced / row).aminmax(dim=-1, keepdim=True)
    scale = half(row * divide(high - low, (1 << bits) - 1), "scale of a group")
    zero = half(row * low + 0.0, "zero of a group")  # see `uniform.affine_grid`
    return uniform.quantize_affine(balanced, scale, zero, bits), scale, zero, column


@rule("balance")
def _balance(form: Form, x: Tensor, frozen: Arrays | None) -> dict[str, Tensor]:
    """Balance, round: rows are channels where scales are per channel, tokens otherwise."""
    bits, group = form.levels.bits, form.group
    if form.sides[0].tokens > 1:
        return _of_channels(x, bits, group, frozen)
    if frozen is not None:
        balanced = x / frozen["balance"].to(torch.float32)
        scale, zero = uniform.affine_grid(balanced, bits)
        codes = uniform.quantize_affine(balanced, scale, zero, bits)
        return {"codes": codes, "scale": scale, "zero": zero}
    codes, scale, zero, column = _rounded_rows(torch.unflatten(x, 2, (-1, group)), bits)
    return {
        "codes": codes.flatten(2, 3),
        "scale": scale.flatten(2, 3),
        "zero": zero.flatten(2, 3),
        "balance": column.squeeze(-2),
    }


def _of_channels(x: Tensor, bits: int, group: int, frozen: Arrays | None) -> dict[str, Tensor]:
    if frozen is not None:
        return _of_cut_tile(x, frozen["scale"], frozen["zero"], bits)
    codes, scale, zero, column = _channel_rows(torch.unflatten(x, 2, (-1, group)).mT, bits)
    return {
        "codes": codes.mT.flatten(2, 3),
        "scale": scale.squeeze(-1),
        "zero": zero.squeeze(-1),
        "balance": column.mT.flatten(2, 3),
    }


def _channel_rows(x: Tensor, bits: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """As `_rounded_rows`, the magnitude of small tiles in the balance."""
    size = x.abs().amax((-2, -1), keepdim=True)
    empty = size < UNIT_MIN
    unit = torch.ldexp(torch.ones_like(size), torch.frexp(size).exponent)
    unit = unit.clamp(UNIT_MIN, 1)
    codes, scale, zero, column = _rounded_rows(x.masked_fill(empty, 0), bits, unit)
    # A tile of zeros gets a grid too: tokens that follow after a rollback need one.
    scale = scale.masked_fill(empty, 2 / ((1 << bits) - 1))
    return codes, scale, zero.masked_fill(empty, -1), column.masked_fill(empty, 0)


def _of_cut_tile(x: Tensor, scale: Tensor, zero: Tensor, bits: int) -> dict[str, Tensor]:
    """Choose the token's balance so that its energy is that of an average token of the grid."""
    steps = float((1 << bits) - 1)
    middle = zero.to(torch.float32) + scale.to(torch.float32) * (steps / 2)
    spread = divide((scale.to(torch.float32) * steps).square(), 12)
    expected = tree_sum(middle.square() + spread)
    expected = torch.where(expected == 0, torch.ones_like(expected), expected)
    column = half(square_root(tree_sum(x.square()) / expected), "balance")
    safe = torch.where(column == 0, torch.ones_like(column), column).to(torch.float32)
    codes = uniform.quantize_affine(x / safe, scale, zero, bits)
    return {"codes": codes, "balance": column}


@dataclass(frozen=True, kw_only=True)
class KVarN(Method):
    """Rotation, then variances balanced over tokens and channels; K per channel, V per token.

    Parameters
    ----------
    bits : int
        2 to 8.
    group : {32, 64, 128}
        Tokens of a tile.
    seed : int
        Chooses the rotation's signs.
    """

    name: ClassVar[str] = "kvarn"
    paper: ClassVar[str] = "arXiv:2606.03458"
    examples: ClassVar[Mapping[str, float]] = {
        "kvarn:bits=3": 0.26,
        "kvarn:bits=3,group=32,sinks=0,window=0": 0.26,
        "kvarn:bits=2": 0.6,
        "kvarn:bits=4,group=128": 0.122,
    }
    bits: int = 4
    group: int = 64
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_choice("bits", range(2, 9))
        self.check_choice("group", (32, 64, 128))

    def key_codec(self, dim: int, dtype: torch.dtype) -> Codec:
        """Return the codec for keys."""
        rows = Side("scale", "mul", tokens=self.group), Side("zero", "add", tokens=self.group)
        return self._codec(dim, "token", (*rows, Side("balance", "mul")))

    def value_codec(self, dim: int, dtype: torch.dtype) -> Codec:
        """Return the codec for values."""
        columns = Side("balance", "mul", tokens=self.group)
        return self._codec(dim, "channel", (Side("scale", "mul"), Side("zero", "add"), columns))

    def _codec(self, dim: int, order: Order, sides: tuple[Side, ...]) -> Codec:
        form = Form(dim, order, Levels("grid", self.bits), sides, "balance")
        return FormCodec(form, RandomHadamard(dim, self.seed), max_norm=LONGEST)
