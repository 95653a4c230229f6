"""Bases of keys: what is subtracted from a token before it is coded, chosen for each by a flag.

The mean of the token's tile, the first key of the sequence, or nothing, whichever is nearest;
`methods.trellis` says why.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvpact.arithmetic import divide, tree_sum
from kvpact.formats.fields import base_fields
from kvpact.methods.base import Arrays
from kvpact.methods.context import Context
from kvpact.quantizers.numbers import half

LEARNT_FROM = 64
"""First tokens of a cache that the first key, and more, are learnt from."""
MEAN, FIRST, NOTHING = 0, 1, 2
"""Bases by their flags."""
_STEPS = 127.0


class Bases:
    """Fields of bases: the mean of `center` tokens (0: none), and the `first` key, if it is one."""

    def __init__(self, dim: int, center: int, first: bool) -> None:
        self._center, self._first = center, first
        self.fields = base_fields(dim, center, first)

    def choose(
        self, x: Tensor, first: Tensor, weight: Tensor, frozen: Arrays | None
    ) -> tuple[Tensor, dict[str, Tensor], dict[str, Tensor]]:
        """Return each token's base, the field of flags and (unless `frozen`) the fields of tiles.

        `first`, `weight`: `[H, D]` fp32, by the latter channels are multiplied where distances are
        taken.
        """
        nothing = x.new_zeros(1)
        first = first.view(1, -1, 1, first.shape[-1])
        weight = weight.view(1, -1, 1, weight.shape[-1])
        far = _distance(x, nothing, weight)
        to_first = _distance(x, first, weight) if self._first else far
        side: dict[str, Tensor] = {}
        mean = nothing
        if self._center and frozen is not None:
            mean = _number(frozen)
        elif self._center and x.shape[2] % self._center == 0:
            side = self._means(x, far, to_first, weight)
            mean = _number(side).repeat_interleave(self._center, 2)
        to_mean = _distance(x, mean, weight) if self._center else far
        flag = torch.where(to_first < to_mean, FIRST, MEAN)
        flag = torch.where(far <= torch.minimum(to_mean, to_first), NOTHING, flag)
        base = torch.where(flag == MEAN, mean, torch.where(flag == FIRST, first, nothing))
        return base, {"base": flag.to(torch.uint8)} if self.fields else {}, side

    def _means(self, x: Tensor, far: Tensor, to_first: Tensor, weight: Tensor) -> dict[str, Tensor]:
        """Return the means of the tokens of each tile that are nearest to theirs."""
        size = self._center
        tiles = torch.unflatten(x, 2, (-1, size))
        every = torch.ones_like(tiles[..., :1], dtype=torch.bool)
        guess = _number(_rounded_mean(tiles, every)).repeat_interleave(size, 2)
        to_mean = _distance(x, guess, weight)
        near = (to_mean < far) & (to_mean < to_first if self._first else True)
        return _rounded_mean(tiles, torch.unflatten(near, 2, (-1, size)))

    def add(self, y: Tensor, arrays: Arrays, first: Tensor) -> Tensor:
        """Return decoded vectors `[B, H, T, D]` with their bases; `first` as in `choose`."""
        if not self.fields:
            return y
        flag = arrays["base"]
        if self._center:
            mean = _number(arrays).repeat_interleave(self._center, 2)[:, :, : y.shape[2]]
            y = torch.where(flag == MEAN, y + mean, y)
        if self._first:
            y = torch.where(flag == FIRST, y + first.view(1, -1, 1, first.shape[-1]), y)
        return y


def first_key(x: Tensor, context: Context) -> Tensor:
    """Return the mean first key, `[H, D]` fp16, of all rows of first tokens `[B, H, T, D]` fp32."""
    keys, there = context.first(x)
    weight = there.to(x.dtype).view(-1, 1, 1, 1)
    total = tree_sum(keys * weight, 0).view(x.shape[1], x.shape[3])
    return half(total / weight.sum().clamp(min=1), "first key")


def _distance(x: Tensor, base: Tensor, weight: Tensor) -> Tensor:
    return tree_sum(((x - base) * weight).square())


def _number(arrays: Arrays) -> Tensor:
    """Return means as numbers, `[B, H, tiles, D]`."""
    return arrays["mean"].to(torch.float32) * arrays["mean_step"].to(torch.float32)


def _rounded_mean(tiles: Tensor, inside: Tensor) -> dict[str, Tensor]:
    """Return the mean over the tokens inside, `[B, H, tiles, D]` int8, and its step in fp16."""
    count = inside.sum(3).clamp(min=1).to(torch.float32)
    mean = tree_sum(torch.where(inside, tiles, torch.zeros_like(tiles)), 3).squeeze(3) / count
    step = half(divide(mean.abs().amax(-1, keepdim=True), _STEPS), "mean of a tile")
    size = step.to(torch.float32)
    safe = torch.where(size == 0, torch.ones_like(size), size)
    whole = (mean / safe).round().clamp(-_STEPS, _STEPS)
    whole = torch.where(size == 0, torch.zeros_like(whole), whole)
    return {"mean": whole.to(torch.int8), "mean_step": step}
