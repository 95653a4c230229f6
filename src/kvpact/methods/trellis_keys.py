"""Keys of `trellis`: a base for each token, then weights, sorted blocks and the trellis."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from kvpact.methods.base import Arrays, Codec
from kvpact.methods.bases import LEARNT_FROM, Bases
from kvpact.methods.trellis_codec import LARGEST_TOKEN, TrellisVectors


def quarters(dim: int, bits: int) -> tuple[tuple[int, int], ...]:
    """Return the blocks of sorted channels: a quarter, a half, a quarter, and their bits.

    Quarters are multiples of 16 channels, whose codes fill words; narrower vectors have one block.
    """
    quarter = dim // 4 // 16 * 16
    if quarter == 0 or dim % 16 or bits == 6:
        return ((dim, bits),)
    return ((quarter, bits + 1), (dim - 2 * quarter, bits), (quarter, bits - 1))


class TreatedKeys(Codec):
    """Keys, with the state that `TrellisKeyCodec` has learnt; nothing is where bases are means."""

    # No base is farther than nothing, weights have a mean square of 1, deviations are at least 1:
    # so a scale is at most the largest number, but for rounding.
    max_abs = LARGEST_TOKEN
    _state: Mapping[str, Tensor]

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
        self._center, self._first, self.weighted, self.sorted = center, first, weights, blocks
        self.group = center or learnt
        self.learns_from = learnt if weights or blocks or first else 0
        self.blocks = quarters(dim, bits) if blocks else ((dim, bits),)
        self._store(TrellisVectors(self.blocks, states, "token", seed, center), center)

    def _store(self, vectors: TrellisVectors, center: int) -> None:
        """Store vectors like those, and bases beside them."""
        self._vectors, self.form = vectors, vectors.form
        self._packed_format, self._encoding = vectors.packed_format, vectors.encoding
        self._bases = Bases(self._dim, center, self._first)
        self.fields = (*vectors.fields, *self._bases.fields)

    def encode(self, x: Tensor, frozen: Arrays | None = None) -> dict[str, Tensor]:
        """Choose bases, weigh, sort, rotate; find the codes."""
        heads = x.shape[1]
        ones = x.new_ones(heads, self._dim)
        weight = self._state["weight"].to(torch.float32) if self.weighted else ones
        base, flag, side = self._bases.choose(x, self._first_key(x), weight, frozen)
        y = (x - base) * weight.view(1, heads, 1, -1)
        return self._vectors.encode(self._rotated(y)) | side | flag

    def _first_key(self, x: Tensor) -> Tensor:
        """Return the first key, `[H, D]` fp32; zero where it is no base."""
        if not self._first:
            return x.new_zeros(x.shape[1], self._dim)
        return self._state["first"].to(torch.float32)

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
        if self.weighted:
            y = y / self._state["weight"].to(torch.float32).view(1, -1, 1, self._dim)
        return self._bases.add(y, arrays, self._first_key(y))
