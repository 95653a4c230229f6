"""TurboQuant (Zandieh, Daliri, Hadian, Mirrokni, arXiv:2504.19874), with options beyond the paper.

mse (Algorithm 1): rotate, `y = R x`, normalise, round every coordinate to the nearest level `c` of
a codebook of N(0, 1); `x ~ R^T (s c)`. Up to 6 bits `c = u k`, where k is a whole number of 8 bits
and u the codebook's unit, so that products of codes are exact in 8-bit integers. The distortion is
.3634, .1175, .03455, .009506, .002519, .000657 for 1 to 6 bits: at most .055 % above that of the
paper's Lloyd-Max levels up to 4 bits, .58 and 1.9 % at 5 and 6. At 7 and 8 bits the levels are the
Lloyd-Max ones (.0001635, .0000412; see `kvpact.quantizers.codebooks`). The fp16 scale `s`, with
`n = |y|` and width D:

- ``ls`` (default): `<c, y> / |c|^2`, the least-squares scale, which has the least distortion.
- ``l2``: `n / sqrt(D)`, the paper's.
- ``unbiased``: `n^2 / <c, y>`, with which inner products are right on average (EDEN); for
  retrieval. In softmax attention the shrinkage of ``ls`` is better.

prod (Algorithm 2, K only): mse with one bit less, then QJL of the residual `r = y - s c`: the signs
of a second rotation, `S r`, and the norm g of r in fp16;
`x ~ R^T (s c + sqrt(pi / (2 D)) g S^T sign(S r))`. S is orthonormal (a Hadamard transform with its
own signs); with the paper's Gaussian matrix the variance would be 2.8 times as large.

center (K only): the mean of each channel over a tile of 64 or 128 tokens is subtracted before the
codebook is applied, and stored, rotated, in fp16: `y ~ m + s c`. Keep exact first tokens (`sinks`)
with it: they are outliers of their tile and would shift its mean.

first (K only, not with prod): each token chooses by a flag what is subtracted: the mean of its tile
(with center; of 8 bits), the first key of the sequence, or nothing (see `kvpact.methods.bases`).
The first key is learnt from the cache's first tokens and kept until it is reset.

Bits per value: bits + 16/D; prod 16/D more; center 16/center more; first 2/D more, and together
with center 8/center + 16/(center D) instead of 16/center; the learnt first key comes on top. The
paper's quantiser is ``scale=l2``; its separate treatment of outlier channels is not built.

Version 2: levels of whole numbers. (Version 1 had Lloyd-Max levels at all bits.)
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kvpact.arithmetic import square_root, tree_sum
from kvpact.formats import CodesField, Order, TokenField
from kvpact.formats.form import Form, Levels, Side
from kvpact.methods.base import Arrays, Codec, Method
from kvpact.methods.bases import LEARNT_FROM, Bases, first_key
from kvpact.methods.context import Context
from kvpact.methods.fitted import KeysThatLearn
from kvpact.methods.rules import FormCodec, applied, book_limit, centered, numbers_of, rounded
from kvpact.quantizers import codebooks
from kvpact.quantizers.numbers import half
from kvpact.transforms import RandomHadamard


class TurboQuantCodec(FormCodec):
    """One stream; `residual_signs`: spend one of the bits on QJL."""

    def __init__(
        self,
        dim: int,
        bits: int,
        scale: str,
        order: Order,
        center: int = 0,
        residual_signs: bool = False,
        seed: int = 0,
    ) -> None:
        self._dim, self._scale, self.has_bias = dim, scale, residual_signs
        values, unit = codebooks.codebook(bits - residual_signs)
        levels = Levels("book", bits - residual_signs, values, unit)
        sides = (Side("scale", "mul"), Side("mean", "add", tokens=center))
        limit = math.inf if center else book_limit(levels, dim, scale)
        form = Form(dim, order, levels, sides if center else sides[:1], scale, limit)
        super().__init__(form, RandomHadamard(dim, seed))
        if center:
            self.max_norm = self._longest(residual_signs)
        if residual_signs:
            self.form = None  # kernels know no QJL
            self._sketch = RandomHadamard(dim, seed + 1)
            signs = CodesField("signs", 1, dim, order), TokenField("residual_norm", 1)
            self.fields = (*self.fields, *signs)

    def _longest(self, residual_signs: bool) -> float:
        """Return the norm up to which no tile's side information can be beyond fp16.

        A token less its mean is at most twice as long, its scale 3.1 / 2 of that, the residual 3.5
        times, at an unbiased scale sqrt(D) times as long.
        """
        if not residual_signs:
            return 20_000.0
        return 20_000.0 / math.sqrt(self._dim) if self._scale == "unbiased" else 5_000.0

    def encode(self, x: Tensor, frozen: Arrays | None = None) -> dict[str, Tensor]:
        """Rotate, take the mean out, round to levels, choose the scale; then QJL of the rest."""
        if not self.has_bias:
            return super().encode(x, frozen)
        y, out = centered(self._form, self.transform.forward(x), frozen)
        out |= rounded(self._form, y)
        points = numbers_of(self._form.levels, out["codes"])
        residual = y - applied(self._form.sides[0], points, out["scale"])
        out["signs"] = (self._sketch.forward(residual) > 0).to(torch.uint8)
        norm = square_root(tree_sum(residual.square()))
        out["residual_norm"] = half(norm, "norm of a residual")
        return out

    def decode(self, arrays: Arrays) -> Tensor:
        """Undo all but the rotation."""
        y = super().decode(arrays)
        return y + self.decode_bias(arrays) if self.has_bias else y

    def decode_bias(self, arrays: Arrays) -> Tensor:
        """Return the residual's estimate; its product with q is the logits' bias."""
        signs = arrays["signs"].to(torch.float32) * 2 - 1
        norm = arrays["residual_norm"].to(torch.float32)
        return self._sketch.inverse(signs * (norm * math.sqrt(math.pi / (2 * self._dim))))


class TurboQuantKeyCodec(KeysThatLearn, TurboQuantCodec):
    """Rotated keys less the mean of their tile, the first key, or nothing."""

    def __init__(self, dim: int, bits: int, scale: str, center: int, seed: int = 0) -> None:
        TurboQuantCodec.__init__(self, dim, bits, scale, "token", seed=seed)
        self.form = None  # kernels know no bases of a codebook's codes
        self._state = {}
        self._bases = Bases(dim, center, first=True)
        self.fields = (*self.fields, *self._bases.fields)
        self.group = center or LEARNT_FROM
        self.learns_from = max(LEARNT_FROM, center)
        self.max_norm = self._longest(False)  # nothing is a base, so no token gets longer

    def state_fields(self) -> dict[str, tuple[int, torch.dtype]]:
        """Return what is learnt: the first key, rotated."""
        return {"first": (self._dim, torch.float16)}

    def _learn(self, x: Tensor, context: Context | None = None) -> dict[str, Tensor]:
        return {"first": first_key(self.transform.forward(x), context or Context())}

    def _encode(self, x: Tensor, frozen: Arrays | None = None) -> dict[str, Tensor]:
        y, first = self.transform.forward(x), self._state["first"].to(torch.float32)
        base, flag, side = self._bases.choose(y, first, torch.ones_like(first), frozen)
        return rounded(self._form, y - base) | flag | side

    def _decode(self, arrays: Arrays) -> Tensor:
        return self._bases.add(
            FormCodec.decode(self, arrays), arrays, self._state["first"].to(torch.float32)
        )


@dataclass(frozen=True, kw_only=True)
class TurboQuant(Method):
    """Random rotation, then a codebook of N(0, 1) and one scale per vector.

    Parameters
    ----------
    bits : int
        Bits per coordinate, 1 to 8; with ``mode=prod`` at least 2, QJL's bit included.
    mode : {"mse", "prod"}
        ``prod`` spends one bit of K on QJL (V stays mse).
    scale : {"ls", "l2", "unbiased"}
        How the scale is chosen: least squares, the norm, or right on average.
    center : {0, 64, 128}
        Tokens of a tile whose mean is subtracted from K; 0 for none.
    first : bool
        Whether each token of K chooses what is subtracted: its tile's mean, the first key of the
        sequence, or nothing.
    seed : int
        Chooses the rotation's signs.

    Examples
    --------
    >>> codec = make_codec(TurboQuant(bits=4), False, 8, torch.float32)
    >>> codes = codec.encode(torch.tensor([[[[-7.0, -4, -2, -1, 0, 1, 3, 8]]]]))
    >>> {name: x.flatten().tolist() for name, x in codes.items()}
    {'codes': [11, 3, 3, 4, 3, 7, 9, 2], 'scale': [3.919921875]}
    """

    name: ClassVar[str] = "turboquant"
    version: ClassVar[int] = 2
    paper: ClassVar[str] = "arXiv:2504.19874"
    key_only: ClassVar[tuple[str, ...]] = ("mode", "center", "first")
    learnt_by: ClassVar[tuple[str, ...] | None] = ("first", "seed")
    added: ClassVar[tuple[str, ...]] = ("first",)
    examples: ClassVar[Mapping[str, float]] = {
        "turboquant:bits=4": 0.101,
        "turboquant:bits=3,center=64": 0.192,
        "turboquant:bits=3,sinks=0,window=0": 0.195,
        "turboquant:bits=4,mode=prod": 0.145,
        "turboquant:bits=3,mode=prod,center=64,sinks=0,window=0": 0.27,
        "turboquant:bits=3,center=64,first=true": 0.192,
    }
    variants: ClassVar[Mapping[str, float]] = {
        "turboquant:bits=1": 0.615,
        "turboquant:bits=2": 0.355,
        "turboquant:bits=8,scale=unbiased": 0.0068,
        "turboquant:bits=2,center=128": 0.355,
        "turboquant:bits=2,first=true,scale=unbiased": 0.38,
    }
    bits: int = 4
    mode: str = "mse"
    scale: str = "ls"
    center: int = 0
    first: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_choice("mode", ("mse", "prod"))
        self.check_choice("bits", range(2 if self.mode == "prod" else 1, 9))
        self.check_choice("scale", ("ls", "l2", "unbiased"))
        self.check_choice("center", (0, 64, 128))
        self.check("first", not self.first or self.mode == "mse", "false with mode=prod")

    def key_codec(self, dim: int, dtype: torch.dtype) -> Codec:
        """Return the codec for keys."""
        if self.first:
            return TurboQuantKeyCodec(dim, self.bits, self.scale, self.center, self.seed)
        signs = self.mode == "prod"
        return TurboQuantCodec(dim, self.bits, self.scale, "token", self.center, signs, self.seed)

    def value_codec(self, dim: int, dtype: torch.dtype) -> Codec:
        """Return the codec for values."""
        return TurboQuantCodec(dim, self.bits, self.scale, "channel", seed=self.seed)
