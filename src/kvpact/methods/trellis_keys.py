"""Keys of `trellis`: a base for each token, then weights, sorted blocks and the trellis.

`TreatedKeys` encodes and decodes with whatever was learnt; `TrellisMeanCodec` learns nothing.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvpact.arithmetic import divide, tree_sum
from kvpact.formats import CodesField, Field, GroupField
from kvpact.formats.encoding import Encoding
from kvpact.formats.packed import PackedFormat
from kvpact.methods.base import Arrays, Codec
from kvpact.methods.trellis_codec import LARGEST_TOKEN, TrellisVectors
from kvpact.quantizers.numbers import half

LEARNT_FROM = 64
"""First tokens of a cache that weights, blocks and the first key are learnt from."""
MEAN, FIRST, NOTHING = 0, 1, 2
"""Bases by their flags."""
_STEPS = 127.0


def quarters(dim: int, bits: int) -> tuple[tuple[int, int], ...]:
    """Return the blocks of sorted channels: a quarter, a half, a quarter, and their bits.

    Quarters are multiples of 16 channels, whose codes fill words; narrower vectors have one block.
    """
    quarter = dim // 4 // 16 * 16
    if quarter == 0 or dim % 16 or bits == 6:
        return ((dim, bits),)
    return ((quarter, bits + 1), (dim - 2 * quarter, bits), (quarter, bits - 1))


class TreatedKeys(Codec):
    """Keys, with the state that a subclass has learnt.

    Parameters
    ----------
    dim, bits, states, center, first, weights, blocks, seed
        As in `Trellis`.
    """

    # No base is farther than nothing, weights have a mean square of 1, deviations are at least 1:
    # so a scale is at most the largest number, but for rounding.
    max_abs = LARGEST_TOKEN
    _state: dict[str, Tensor]

    def __init__(
        self,
        dim: int,
        bits: int,
        states: int,
        *,
        center: int,
        first: bool,
        weights: bool,
        blocks: bool,
        seed: int = 0,
    ) -> None:
        learnt = max(LEARNT_FROM, center)
        self._dim, self._state = dim, {}
        self._center, self._first, self._weighted, self._sorted = center, first, weights, blocks
        self.group = center or learnt
        self.learns_from = learnt if weights or blocks or first else 0
        self.blocks = quarters(dim, bits) if blocks else ((dim, bits),)
        self._vectors = TrellisVectors(self.blocks, states, "token", seed, center)
        self.form = self._vectors.form
        fields: list[Field] = [*self._vectors.fields]
        if center or first:
            fields.append(CodesField("base", 2, 1, "channel"))
        if center:
            fields.append(GroupField("mean", dim, center, torch.int8))
            fields.append(GroupField("mean_step", 1, center))
        self.fields = tuple(fields)

    def encoding(self) -> Encoding:
        """Describe `encode` to the native kernels."""
        return Encoding(
            "trellis",
            max(bits for _, bits in self.blocks),
            self.max_abs,
            group=self._center or 1,
            mean="mean" if self._center else None,
            base="base" if self._center or self._first else None,
            step="mean_step" if self._center else None,
            trellis=self.form,
        )

    def _choose_base(
        self, x: Tensor, first: Tensor, weight: Tensor, frozen: Arrays | None
    ) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """Return each token's base `[B, H, T, D]`, its flag, and the side information."""
        nothing = x.new_zeros(1)
        first = first.view(1, -1, 1, first.shape[-1])
        weight = weight.view(1, -1, 1, weight.shape[-1])
        far = _distance(x, nothing, weight)
        to_first = _distance(x, first, weight) if self._first else far
        side: dict[str, Tensor] = {}
        mean = nothing
        if self._center and frozen is not None:
            mean = frozen["mean"].to(torch.float32) * frozen["mean_step"].to(torch.float32)
        elif self._center and x.shape[2] % self._center == 0:
            side = self._means(x, far, to_first, weight)
            means = side["mean"].to(torch.float32) * side["mean_step"].to(torch.float32)
            mean = means.repeat_interleave(self._center, 2)
        to_mean = _distance(x, mean, weight) if self._center else far
        flag = torch.where(to_first < to_mean, FIRST, MEAN)
        flag = torch.where(far <= torch.minimum(to_mean, to_first), NOTHING, flag)
        base = torch.where(flag == MEAN, mean, torch.where(flag == FIRST, first, nothing))
        return base, flag, side

    def _means(self, x: Tensor, far: Tensor, to_first: Tensor, weight: Tensor) -> dict[str, Tensor]:
        """Return the means of the tokens of each tile that are nearest to theirs."""
        size = self._center
        tiles = torch.unflatten(x, 2, (-1, size))
        mean, step = _rounded_mean(tiles, torch.ones_like(tiles[..., :1], dtype=torch.bool))
        guess = (mean.to(torch.float32) * step.to(torch.float32)).repeat_interleave(size, 2)
        to_mean = _distance(x, guess, weight)
        near = (to_mean < far) & (to_mean < to_first if self._first else True)
        mean, step = _rounded_mean(tiles, torch.unflatten(near, 2, (-1, size)))
        return {"mean": mean, "mean_step": step}

    def packed_format(self) -> PackedFormat:
        """Blocks with rotations of their own, and the bases."""
        return self._vectors.packed_format(
            base="base" if self._center or self._first else None,
            mean="mean" if self._center else None,
            step="mean_step" if self._center else None,
        )

    def encode(self, x: Tensor, frozen: Arrays | None = None) -> dict[str, Tensor]:
        """Choose bases, weigh, sort, rotate; find the codes."""
        heads = x.shape[1]
        ones = x.new_ones(heads, self._dim)
        first = self._state["first"].to(torch.float32) if self._first else ones
        weight = self._state["weight"].to(torch.float32) if self._weighted else ones
        base, flag, side = self._choose_base(x, first, weight, frozen)
        y = (x - base) * weight.view(1, heads, 1, -1)
        out = self._vectors.encode(self._rotated(y)) | side
        if self._center or self._first:
            out["base"] = flag.to(torch.uint8)
        return out

    def _rotated(self, y: Tensor) -> Tensor:
        """Sort channels into blocks; rotate each and divide it by its deviation."""
        if "order" in self._state:
            y = y.gather(-1, self._order(y))
        parts = list(torch.split(y, [width for width, _ in self.blocks], -1))
        parts = [
            rotation.forward(part)
            for rotation, part in zip(self._vectors.rotations, parts, strict=True)
        ]
        if "deviation" in self._state:
            sizes = [torch.ones_like(size) / size for size in self._deviations()]
            parts = [part * inverse for part, inverse in zip(parts, sizes, strict=True)]
        return torch.cat(parts, -1)

    def _order(self, y: Tensor) -> Tensor:
        order = self._state["order"].to(torch.int64)
        return order.view(1, order.shape[0], 1, -1).expand(y.shape)

    def _deviations(self) -> list[Tensor]:
        return [size.view(1, -1, 1, 1) for size in self._state["deviation"].to(torch.float32).T]

    def decode(self, arrays: Arrays) -> Tensor:
        """Undo it all."""
        y = self._vectors.decode(arrays)
        parts = list(torch.split(y, [width for width, _ in self.blocks], -1))
        if "deviation" in self._state:
            parts = [part * size for part, size in zip(parts, self._deviations(), strict=True)]
        parts = [
            rotation.inverse(part)
            for rotation, part in zip(self._vectors.rotations, parts, strict=True)
        ]
        y = torch.cat(parts, -1)
        if "order" in self._state:
            y = torch.empty_like(y).scatter_(-1, self._order(y), y)
        if self._weighted:
            y = y / self._state["weight"].to(torch.float32).view(1, -1, 1, self._dim)
        if "base" not in arrays:
            return y
        flag = arrays["base"]
        if self._center:
            mean = arrays["mean"].to(torch.float32) * arrays["mean_step"].to(torch.float32)
            mean = mean.repeat_interleave(self._center, 2)[:, :, : y.shape[2]]
            y = torch.where(flag == MEAN, y + mean, y)
        if self._first:
            first = self._state["first"].to(torch.float32).view(1, -1, 1, self._dim)
            y = torch.where(flag == FIRST, y + first, y)
        return y


class TrellisMeanCodec(TreatedKeys):
    """Keys less the mean of their tile, or nothing: without weights, blocks and first key."""

    def __init__(self, dim: int, bits: int, states: int, center: int, seed: int = 0) -> None:
        super().__init__(
            dim, bits, states, center=center, first=False, weights=False, blocks=False, seed=seed
        )


def _distance(x: Tensor, base: Tensor, weight: Tensor) -> Tensor:
    return tree_sum(((x - base) * weight).square())


def _rounded_mean(tiles: Tensor, inside: Tensor) -> tuple[Tensor, Tensor]:
    """Return the mean over the tokens inside, `[B, H, tiles, D]` int8, and its step in fp16."""
    count = inside.sum(3).clamp(min=1).to(torch.float32)
    mean = tree_sum(torch.where(inside, tiles, torch.zeros_like(tiles)), 3).squeeze(3) / count
    step = half(divide(mean.abs().amax(-1, keepdim=True), _STEPS), "mean of a tile")
    size = step.to(torch.float32)
    safe = torch.where(size == 0, torch.ones_like(size), size)
    whole = (mean / safe).round().clamp(-_STEPS, _STEPS)
    return torch.where(size == 0, torch.zeros_like(whole), whole).to(torch.int8), step
