"""Streams of `turboquant`: rotated vectors as levels of a codebook and a scale."""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

from kvpact.arithmetic import divide, square_root, tree_sum
from kvpact.formats import CodesField, Field, GroupField, TokenField
from kvpact.formats.encoding import Encoding
from kvpact.formats.packed import PackedFormat
from kvpact.methods.base import Arrays, Codec
from kvpact.quantizers import codebooks
from kvpact.quantizers.numbers import HALF_MAX, cast, half
from kvpact.transforms import RandomHadamard


class TurboQuantCodec(Codec):
    """One stream.

    `dim`, `bits`, `scale`, `center`, `seed`: as in `TurboQuant`; `residual_signs`: spend one of the
    bits on QJL.
    """

    def __init__(
        self,
        dim: int,
        bits: int,
        scale: str,
        order: Literal["token", "channel"],
        center: int = 0,
        residual_signs: bool = False,
        seed: int = 0,
    ) -> None:
        self._dim, self._scale, self._center = dim, scale, center
        self._bits = bits - 1 if residual_signs else bits
        self.has_bias = residual_signs
        self.group = center or 1
        if center:
            self.max_norm = self._longest(residual_signs)
        self.transform = RandomHadamard(dim, seed)
        self._sketch = RandomHadamard(dim, seed + 1)
        fields: list[Field] = [CodesField("codes", self._bits, dim, order), TokenField("scale", 1)]
        if center:
            fields.append(GroupField("mean", dim, center))
        if residual_signs:
            fields += [CodesField("signs", 1, dim, order), TokenField("residual_norm", 1)]
        self.fields = tuple(fields)

    def _longest(self, residual_signs: bool) -> float:
        """Return the norm up to which no tile's side information can be beyond fp16.

        Less its tile's mean a token is at most twice as long as the longest; its scale is at most
        3.1 / 2 of that (a level is at least 1 / 2.17 of what is rounded to it, and the last one
        above 0.79). The residual is at most 3.5 times as long as the token; at an unbiased scale
        sqrt(D) times, for a token in one coordinate.
        """
        if not residual_signs:
            return 20_000.0
        return 20_000.0 / math.sqrt(self._dim) if self._scale == "unbiased" else 5_000.0

    def encode(self, x: Tensor, frozen: Arrays | None = None) -> dict[str, Tensor]:
        """Rotate, take the mean out, round to levels, choose the scale."""
        y, out = self.transform.forward(x), {}
        if self._center and frozen is None:
            tiles = torch.unflatten(y, 2, (-1, self._center))
            out["mean"] = half((tree_sum(tiles, 3) / self._center).squeeze(3), "mean of a tile")
            y = (tiles - out["mean"].to(torch.float32).unsqueeze(3)).flatten(2, 3)
        elif frozen is not None:
            y = y - frozen["mean"].to(torch.float32)
        out |= self._rounded(y)
        if self.has_bias:
            residual = y - self._levels(out)
            out["signs"] = (self._sketch.forward(residual) > 0).to(torch.uint8)
            norm = square_root(tree_sum(residual.square()))
            out["residual_norm"] = half(norm, "norm of a residual")
        return out

    def _rounded(self, y: Tensor) -> dict[str, Tensor]:
        """Round rotated vectors to levels and choose their scale."""
        energy = tree_sum(y.square())
        norm = cast(square_root(energy), torch.float32, "norm of a token")
        safe = torch.where(norm == 0, torch.ones_like(norm), norm)
        codes = codebooks.assign(y * (math.sqrt(self._dim) / safe), self._bits)
        points = codebooks.lookup(codes, self._bits)
        scale = half(self._choose_scale(y, points, energy, norm), "scale of a token")
        return {"codes": codes, "scale": scale}

    def _levels(self, arrays: Arrays) -> Tensor:
        """Undo `_rounded`."""
        return codebooks.lookup(arrays["codes"], self._bits) * arrays["scale"].to(torch.float32)

    def _choose_scale(self, y: Tensor, points: Tensor, energy: Tensor, norm: Tensor) -> Tensor:
        if self._scale == "l2":
            return divide(norm, math.sqrt(self._dim))
        product = tree_sum(points * y)
        if self._scale == "ls":
            return product / tree_sum(points.square())
        return torch.where(product == 0, torch.zeros_like(product), energy / product)

    def decode(self, arrays: Arrays) -> Tensor:
        """Undo all but the rotation."""
        y = self._levels(arrays)
        if self._center:
            mean = arrays["mean"].to(torch.float32).unsqueeze(3)
            y = (torch.unflatten(y, 2, (-1, self._center)) + mean).flatten(2, 3)
        return y + self.decode_bias(arrays) if self.has_bias else y

    def packed_format(self) -> PackedFormat | None:
        """Levels times the token's scale, and the mean of a tile; QJL has none."""
        if self.has_bias:
            return None
        levels, unit = codebooks.codebook(self._bits)
        return PackedFormat(
            "table",
            self._bits,
            levels,
            unit=unit,
            scale="scale",
            shift="mean" if self._center else None,
            group=self._center,
        )

    def encoding(self) -> Encoding | None:
        """A codebook after a rotation; QJL of what that leaves has none."""
        if self.has_bias:
            return None
        cpu = torch.device("cpu")
        levels = codebooks.levels(self._bits, cpu).tolist()
        boundaries = codebooks.boundaries(self._bits, cpu).tolist()
        growth = 1.0 if self._scale == "l2" else self._growth(levels, boundaries)
        return Encoding(
            "codebook",
            self._bits,
            math.inf if self._center else 0.9 * HALF_MAX / growth,
            self._scale,
            self._center or 1,
            levels=tuple(levels),
            boundaries=tuple(boundaries),
            mean="mean" if self._center else None,
        )

    def _growth(self, levels: list[float], boundaries: list[float]) -> float:
        """Return how many times the largest magnitude a scale can be.

        The rotation keeps the length. A level is at least `share` of what is rounded to it, be it
        in an inner cell or (sqrt(D) at most) in the last one, and at least the least level.
        """
        half_way = len(levels) // 2
        positive, ends = levels[half_way:], [*boundaries[half_way:], math.sqrt(self._dim)]
        share = min(level / end for level, end in zip(positive, ends, strict=True))
        least = positive[0] / (math.sqrt(self._dim) if self._scale == "unbiased" else 1)
        return 1 / max(share, least)

    def decode_bias(self, arrays: Arrays) -> Tensor:
        """Return the residual's estimate; its product with q is the logits' bias."""
        signs = arrays["signs"].to(torch.float32) * 2 - 1
        norm = arrays["residual_norm"].to(torch.float32)
        return self._sketch.inverse(signs * (norm * math.sqrt(math.pi / (2 * self._dim))))
