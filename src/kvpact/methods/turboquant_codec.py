"""Streams of `turboquant`: rotated vectors as levels of a codebook and a scale.

Keys may be less a base that each token chooses by a flag (`kvpact.methods.bases`).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from kvpact.arithmetic import square_root, tree_sum
from kvpact.formats import CodesField, Order, TokenField
from kvpact.formats.form import Form, Levels, Side
from kvpact.methods.base import Arrays
from kvpact.methods.bases import LEARNT_FROM, Bases, first_key
from kvpact.methods.context import Context
from kvpact.methods.fitted import KeysThatLearn
from kvpact.methods.rules import FormCodec, applied, book_limit, centered, numbers_of, rounded
from kvpact.quantizers import codebooks
from kvpact.quantizers.numbers import half
from kvpact.transforms import RandomHadamard


class TurboQuantCodec(FormCodec):
    """One stream.

    `dim`, `bits`, `scale`, `center`, `seed`: as in `TurboQuant`; `residual_signs`: spend one of the
    bits on QJL.
    """

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
            self._packed_format = self._encoding = None  # kernels know no QJL
            self._sketch = RandomHadamard(dim, seed + 1)
            signs = CodesField("signs", 1, dim, order), TokenField("residual_norm", 1)
            self.fields = (*self.fields, *signs)

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
        """Rotate, take the mean out, round to levels, choose the scale; then QJL of the rest."""
        if not self.has_bias:
            return super().encode(x, frozen)
        y, out = centered(self.form, self.transform.forward(x), frozen)
        out |= rounded(self.form, y)
        points = numbers_of(self.form.levels, out["codes"])
        residual = y - applied(self.form.sides[0], points, out["scale"])
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
    """Rotated keys less the mean of their tile, the first key, or nothing.

    `dim`, `bits`, `scale`, `center`, `seed`: as in `TurboQuant`.
    """

    def __init__(self, dim: int, bits: int, scale: str, center: int, seed: int = 0) -> None:
        TurboQuantCodec.__init__(self, dim, bits, scale, "token", seed=seed)
        self._packed_format = self._encoding = None  # kernels know no bases of a codebook's codes
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
        return rounded(self.form, y - base) | flag | side

    def _decode(self, arrays: Arrays) -> Tensor:
        return self._bases.add(
            FormCodec.decode(self, arrays), arrays, self._state["first"].to(torch.float32)
        )
