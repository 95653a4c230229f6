"""TurboQuant (Zandieh, Daliri, Hadian, Mirrokni, arXiv:2504.19874), with options beyond the paper.

mse (Algorithm 1): rotate, `y = R x`, normalise, round every coordinate to the nearest level `c` of
a codebook of N(0, 1); `x ~ R^T (s c)`. Up to 6 bits `c = u k`, k a whole number of 8 bits and u the
codebook's unit, so that products of codes are exact in 8-bit integers: distortion .3634, .1175,
.03455, .009506, .002519, .000657 for 1 to 6 bits, at most .055 % above the paper's Lloyd-Max levels
up to 4 bits, .58 and 1.9 % at 5 and 6; 7 and 8 bits have the paper's (.0001635, .0000412; see
`kvpact.quantizers.codebooks`). The fp16 scale `s`, with n = |y| and width D:

- ``ls`` (default): `<c, y> / |c|^2`, the least-squares scale: least distortion.
- ``l2``: `n / sqrt(D)`, the paper's.
- ``unbiased``: `n^2 / <c, y>`: inner products are right on average (EDEN); for retrieval. In
  softmax attention the shrinkage of ``ls`` is better.

prod (Algorithm 2, K only): mse with one bit less, then QJL of the residual `r = y - s c`: the
signs of a second rotation `S r` and its norm g in fp16;
`x ~ R^T (s c + sqrt(pi / (2 D)) g S^T sign(S r))`. S is orthonormal
(a Hadamard transform with its own signs), which has 2.8 times less variance than the paper's
Gaussian matrix.

center (K only): the mean of each channel over a tile of 64 or 128 tokens is taken out before the
codebook (it is stored rotated, in fp16): `y = m + s c`. Wants the first tokens exact (sinks): they
are outliers of their tile and move its mean.

Bits per value: bits + 16/D; prod 16/D more; center 16/center more.
Presets of the paper: ``turboquant:bits=2`` to ``bits=4``.

Version 2: levels of whole numbers. (Version 1 had Lloyd-Max levels at all widths.)
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from kvpact.arithmetic import divide, square_root, tree_sum
from kvpact.formats import CodesField, Field, GroupField, TokenField
from kvpact.formats.encoding import Encoding
from kvpact.formats.packed import PackedFormat
from kvpact.methods.base import Arrays, Codec, Method
from kvpact.quantizers import codebooks
from kvpact.quantizers.numbers import HALF_MAX, half
from kvpact.transforms import RandomHadamard


class TurboQuantCodec(Codec):
    """One stream.

    Parameters
    ----------
    dim, bits, scale, center, seed
        As in `TurboQuant`.
    order : {"token", "channel"}
        Order of the packed codes.
    residual_signs : bool
        Spend one of the bits on QJL.
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
        energy = tree_sum(y.square())
        norm = square_root(energy)
        safe = torch.where(norm == 0, torch.ones_like(norm), norm)
        codes = codebooks.assign(y * (math.sqrt(self._dim) / safe), self._bits)
        points = codebooks.lookup(codes, self._bits)
        scale = half(self._choose_scale(y, points, energy, norm), "scale of a token")
        out |= {"codes": codes, "scale": scale}
        if self.has_bias:
            residual = y - points * scale.to(torch.float32)
            out["signs"] = (self._sketch.forward(residual) > 0).to(torch.uint8)
            norm = square_root(tree_sum(residual.square()))
            out["residual_norm"] = half(norm, "norm of a residual")
        return out

    def _choose_scale(self, y: Tensor, points: Tensor, energy: Tensor, norm: Tensor) -> Tensor:
        if self._scale == "l2":
            return divide(norm, math.sqrt(self._dim))
        product = tree_sum(points * y)
        if self._scale == "ls":
            return product / tree_sum(points.square())
        return torch.where(product == 0, torch.zeros_like(product), energy / product)

    def decode(self, arrays: Arrays) -> Tensor:
        """Undo all but the rotation."""
        y = codebooks.lookup(arrays["codes"], self._bits) * arrays["scale"].to(torch.float32)
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


@dataclass(frozen=True, kw_only=True)
class TurboQuant(Method):
    """Random rotation, then a codebook of N(0, 1) and one scale per vector.

    Parameters
    ----------
    bits : int
        1 to 8 bits per coordinate; with ``mode=prod`` at least 2, QJL's bit included.
    mode : {"mse", "prod"}
        ``prod`` adds QJL to K (V stays mse).
    scale : {"ls", "l2", "unbiased"}
        How the scale is chosen.
    center : {0, 64, 128}
        Tokens of a tile whose mean is taken out of K; 0 for none.
    seed : int
        Chooses the rotation's signs.
    """

    name: ClassVar[str] = "turboquant"
    version: ClassVar[int] = 2
    paper: ClassVar[str] = "arXiv:2504.19874"
    key_only: ClassVar[tuple[str, ...]] = ("mode", "center")
    examples: ClassVar[Mapping[str, float]] = {
        "turboquant:bits=4": 0.101,
        "turboquant:bits=3,center=64": 0.192,
        "turboquant:bits=3,sinks=0,window=0": 0.195,
        "turboquant:bits=4,mode=prod": 0.145,
        "turboquant:bits=3,mode=prod,center=64,sinks=0,window=0": 0.27,
    }
    variants: ClassVar[Mapping[str, float]] = {
        "turboquant:bits=1": 0.615,
        "turboquant:bits=2": 0.355,
        "turboquant:bits=8,scale=unbiased": 0.0068,
        "turboquant:bits=2,center=128": 0.355,
    }
    bits: int = 4
    mode: str = "mse"
    scale: str = "ls"
    center: int = 0
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_choice("mode", ("mse", "prod"))
        self.check_choice("bits", range(2 if self.mode == "prod" else 1, 9))
        self.check_choice("scale", ("ls", "l2", "unbiased"))
        self.check_choice("center", (0, 64, 128))

    def key_codec(self, dim: int, dtype: torch.dtype) -> Codec:
        """Return the codec for keys."""
        signs = self.mode == "prod"
        return TurboQuantCodec(dim, self.bits, self.scale, "token", self.center, signs, self.seed)

    def value_codec(self, dim: int, dtype: torch.dtype) -> Codec:
        """Return the codec for values."""
        return TurboQuantCodec(dim, self.bits, self.scale, "channel", seed=self.seed)
