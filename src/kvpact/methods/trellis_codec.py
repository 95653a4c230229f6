"""Rotated vectors as codes of a trellis and a scale: what `trellis` stores of V, and of a block."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from kvpact.arithmetic import divide, square_root, tree_sum
from kvpact.formats import Order
from kvpact.formats.bitpack import WORD, Blocks, planes
from kvpact.formats.form import Form, Levels, TrellisBlock, TrellisForm
from kvpact.methods.base import Arrays, Codec
from kvpact.quantizers import trellis
from kvpact.quantizers.numbers import from_e5m3, to_e5m3
from kvpact.transforms import RandomHadamard

LARGEST_TOKEN = 60_000.0
"""The scale of tokens without a larger number can't overflow, however it is rounded."""


@lru_cache(maxsize=256)
def places(dim: int, bits: int, interleave: int, device: torch.device) -> Tensor:
    """Return the step of the trellis that each code of a token stands for, `[dim]`, for K.

    Step i is in word `i % words`: the coded bits that an index needs are at the same place of other
    words, and kernels compute the indices of a whole word at once. Of one bit wider words take
    part.
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


def trellis_of(
    blocks: Blocks, states: int, seed: int = 0, center: int = 0, first: bool = False
) -> TrellisForm:
    """Return a trellis by its blocks' channels and bits, with rotations from `seed` on."""
    made = tuple(
        TrellisBlock(dim, bits, trellis.states_of(dim, states), seed + i)
        for i, (dim, bits) in enumerate(blocks)
    )
    # A vector has to be longer than the memory of the trellis.
    codes = sum(max(dim, trellis.LEAST) for dim, _ in blocks)
    return TrellisForm(made, codes, 4 if max(bits for _, bits in blocks) <= 3 else 8, center, first)


class TrellisVectors:
    """Codes and a scale of rotated vectors; `order`: ``channel`` for one block."""

    def __init__(self, known: TrellisForm, order: Order) -> None:
        self._trellis = known
        self.rotations = [RandomHadamard(block.dim, block.seed) for block in known.blocks]
        self.widths = [block.dim for block in known.blocks]
        self._codes = [max(dim, trellis.LEAST) for dim in self.widths]
        levels = Levels("trellis", max(block.bits for block in known.blocks), trellis=known)
        self.form = Form(sum(self.widths), order, levels, (), "trellis", LARGEST_TOKEN)

    def encode(self, y: Tensor) -> dict[str, Tensor]:
        """Return the arrays of vectors `[..., D]` fp32."""
        size = square_root(divide(tree_sum(y.square()), y.shape[-1]))
        scale = to_e5m3(size, "size of a token")
        n = from_e5m3(scale)
        empty = scale == 0
        safe = torch.where(empty, torch.ones_like(n), n)
        codes = []
        parts = torch.split(y, self.widths, -1)
        for part, block, dim in zip(parts, self._trellis.blocks, self._codes, strict=True):
            if not block.bits:
                codes.append(torch.zeros_like(part, dtype=torch.uint8))
                continue
            z = part * (torch.ones_like(safe) / (safe * trellis.UNITS[block.bits]))
            z = torch.nn.functional.pad(z, (0, dim - block.dim))
            found = trellis.encode(z, block.bits, block.states)
            if self.form.order == "token":
                found = found[..., places(dim, block.bits, self._trellis.interleave, y.device)]
            codes.append(found)
        return {"codes": torch.cat(codes, -1).masked_fill(empty, 0), "scale": scale}

    def decode(self, arrays: Arrays) -> Tensor:
        """Undo `encode`: `[..., D]` fp32."""
        n, out = from_e5m3(arrays["scale"]), []
        parts = torch.split(arrays["codes"], self._codes, -1)
        for codes, block, dim in zip(parts, self._trellis.blocks, self._codes, strict=True):
            if not block.bits:
                out.append(torch.zeros_like(codes, dtype=torch.float32))
                continue
            if self.form.order == "token":
                codes = codes[..., steps(dim, block.bits, self._trellis.interleave, codes.device)]
            levels = trellis.lookup(codes, block.bits, block.states) * trellis.UNITS[block.bits]
            out.append(levels[..., : block.dim])
        return torch.cat(out, -1) * n


class TrellisCodec(Codec):
    """One stream, rotated as a whole. `dim`, `bits`, `states`, `seed`: as in `Trellis`."""

    def __init__(self, dim: int, bits: int, states: int, order: Order, seed: int = 0) -> None:
        self._vectors = TrellisVectors(trellis_of(((dim, bits),), states, seed), order)
        (self.transform,) = self._vectors.rotations
        self.form, self.fields = self._vectors.form, self._vectors.form.fields

    def encode(self, x: Tensor, frozen: Arrays | None = None) -> dict[str, Tensor]:
        """Rotate, choose the scale, find the codes."""
        return self._vectors.encode(self.transform.forward(x))

    def decode(self, arrays: Arrays) -> Tensor:
        """Undo all but the rotation."""
        return self._vectors.decode(arrays)
