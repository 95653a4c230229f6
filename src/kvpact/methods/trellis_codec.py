"""Rotated vectors as codes of a trellis and a scale: what `trellis` stores of V, and of a block."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from kvpact.arithmetic import divide, square_root, tree_sum
from kvpact.formats import CodesField, Order, TokenField
from kvpact.formats.bitpack import WORD, Blocks, planes
from kvpact.formats.encoding import Encoding
from kvpact.formats.packed import PackedFormat, TrellisBlock, TrellisForm
from kvpact.methods.base import Arrays, Codec
from kvpact.quantizers import trellis
from kvpact.quantizers.numbers import from_e5m3, to_e5m3
from kvpact.transforms import RandomHadamard

LARGEST_TOKEN = 60_000.0
"""The scale of tokens without a larger number can't overflow, however it is rounded."""


@lru_cache(maxsize=256)
def places(dim: int, bits: int, interleave: int, device: torch.device) -> Tensor:
    """Return the step of the trellis that each code of a token stands for, `[dim]`, for K.

    In a word of K lie codes of one token. Step i is in word `i % words`: so the coded bits that an
    index needs besides its own are at the same place of other words, and kernels compute the
    indices of a whole word at once. Of one bit there are too few words; the wider ones that kernels
    make of them take their place.
    """
    width = planes(bits)[0] if bits > 1 else interleave
    words, rest = divmod(dim * width, WORD)
    if rest:
        return torch.arange(dim, dtype=torch.int64, device=device)  # no kernel reads these
    wider, items = interleave // width, WORD // interleave
    axes = (torch.arange(n, dtype=torch.int64, device=device) for n in (words, wider, items))
    word, inside, item = torch.meshgrid(*axes, indexing="ij")
    return ((item * wider + inside) * words + word).flatten()


@lru_cache(maxsize=256)
def steps(dim: int, bits: int, interleave: int, device: torch.device) -> Tensor:
    """Return the place among the codes of each step, `[dim]`: undoes `places`."""
    return places(dim, bits, interleave, device).argsort()


class TrellisVectors:
    """Codes and a scale of rotated vectors, in blocks of channels with trellises of their own.

    - `blocks`: channels and bits of each; without bits zeros. `order`: ``channel`` for one block.
    - `seed`: of the first block's rotation; the others' follow. `center`: tokens of a mean, or 0.
    """

    def __init__(
        self, blocks: Blocks, states: int, order: Order, seed: int = 0, center: int = 0
    ) -> None:
        self._widths = [dim for dim, _ in blocks]
        if len(blocks) == 1:
            # A vector has to be longer than the memory of the trellis.
            blocks = ((max(blocks[0][0], trellis.LEAST), blocks[0][1]),)
        self.blocks, self.states, self._order = blocks, states, order
        bits = max(bits for _, bits in blocks)
        self.interleave = 4 if bits <= 3 else 8
        held = sum(dim for dim, _ in blocks)
        several = blocks if len(blocks) > 1 else ()
        codes = CodesField("codes", bits, held, order, self.interleave, several)
        self.fields = (codes, TokenField("scale", 1, torch.uint8))
        self.rotations = [RandomHadamard(dim, seed + i) for i, dim in enumerate(self._widths)]
        parts = zip(self.rotations, blocks, strict=True)
        self.form = TrellisForm(
            tuple(
                TrellisBlock(part.dim, bits, trellis.states_of(part.dim, states), part.seed)
                for part, (_, bits) in parts
            ),
            self.interleave,
            center,
        )
        known: Any = {"group": center or 1, "trellis": self.form}
        self.packed_format = PackedFormat("trellis", bits, scale="scale", trellis=self.form)
        self.encoding = Encoding("trellis", bits, LARGEST_TOKEN, **known)

    def encode(self, y: Tensor) -> dict[str, Tensor]:
        """Return the arrays of vectors `[..., D]` fp32."""
        size = square_root(divide(tree_sum(y.square()), y.shape[-1]))
        scale = to_e5m3(size, "size of a token")
        n = from_e5m3(scale)
        empty = scale == 0
        safe = torch.where(empty, torch.ones_like(n), n)
        codes = []
        for part, (dim, bits) in zip(torch.split(y, self._widths, -1), self.blocks, strict=True):
            if not bits:
                codes.append(torch.zeros_like(part, dtype=torch.uint8))
                continue
            z = part * (torch.ones_like(safe) / (safe * trellis.UNITS[bits]))
            z = torch.nn.functional.pad(z, (0, dim - part.shape[-1]))
            found = trellis.encode(z, bits, trellis.states_of(dim, self.states))
            if self._order == "token":
                found = found[..., places(dim, bits, self.interleave, y.device)]
            codes.append(found)
        return {"codes": torch.cat(codes, -1).masked_fill(empty, 0), "scale": scale}

    def decode(self, arrays: Arrays) -> Tensor:
        """Undo `encode`: `[..., D]` fp32."""
        n, out = from_e5m3(arrays["scale"]), []
        parts = torch.split(arrays["codes"], [dim for dim, _ in self.blocks], -1)
        for codes, (dim, bits), width in zip(parts, self.blocks, self._widths, strict=True):
            if not bits:
                out.append(torch.zeros_like(codes, dtype=torch.float32))
                continue
            if self._order == "token":
                codes = codes[..., steps(dim, bits, self.interleave, codes.device)]
            states = trellis.states_of(dim, self.states)
            levels = trellis.lookup(codes, bits, states) * trellis.UNITS[bits]
            out.append(levels[..., :width])
        return torch.cat(out, -1) * n


class TrellisCodec(Codec):
    """One stream, rotated as a whole. `dim`, `bits`, `states`, `seed`: as in `Trellis`."""

    def __init__(self, dim: int, bits: int, states: int, order: Order, seed: int = 0) -> None:
        self._vectors = TrellisVectors(((dim, bits),), states, order, seed)
        (self.transform,) = self._vectors.rotations
        self.fields, self.form = self._vectors.fields, self._vectors.form
        self._packed_format, self._encoding = self._vectors.packed_format, self._vectors.encoding

    def encode(self, x: Tensor, frozen: Arrays | None = None) -> dict[str, Tensor]:
        """Rotate, choose the scale, find the codes."""
        return self._vectors.encode(self.transform.forward(x))

    def decode(self, arrays: Arrays) -> Tensor:
        """Undo all but the rotation."""
        return self._vectors.decode(arrays)
