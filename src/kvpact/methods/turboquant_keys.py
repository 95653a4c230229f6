"""Keys of `turboquant` less a base that each token chooses by a flag (`kvpact.methods.bases`)."""

from __future__ import annotations

import torch
from torch import Tensor

from kvpact.methods.base import Arrays
from kvpact.methods.bases import LEARNT_FROM, Bases, first_key
from kvpact.methods.context import Context
from kvpact.methods.fitted import KeysThatLearn
from kvpact.methods.rules import FormCodec, rounded
from kvpact.methods.turboquant_codec import TurboQuantCodec


class TurboQuantKeyCodec(KeysThatLearn, TurboQuantCodec):
    """Rotated keys less the mean of their tile, the first key, or nothing.

    `dim`, `bits`, `scale`, `center`, `seed`: as in `TurboQuant`.
    """

    def __init__(self, dim: int, bits: int, scale: str, center: int, seed: int = 0) -> None:
        TurboQuantCodec.__init__(self, dim, bits, scale, "token", seed=seed)
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

    def packed_format(self) -> None:
        """No kernel adds bases to codes of a codebook."""

    def encoding(self) -> None:
        """No kernel takes bases off before a codebook."""
