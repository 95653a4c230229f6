"""Keys of `turboquant` less a base that each token chooses by a flag (`kvpact.methods.bases`)."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from kvpact.methods.base import Arrays
from kvpact.methods.bases import LEARNT_FROM, Bases, first_key
from kvpact.methods.context import Context
from kvpact.methods.fitted import FittedCodec
from kvpact.methods.rules import FormCodec, rounded
from kvpact.methods.turboquant_codec import TurboQuantCodec


class TurboQuantKeyCodec(TurboQuantCodec, FittedCodec):
    """Rotated keys less the mean of their tile, the first key, or nothing.

    Its state is the first key, rotated.

    `dim`, `bits`, `scale`, `center`, `seed`: as in `TurboQuant`.
    """

    def __init__(self, dim: int, bits: int, scale: str, center: int, seed: int = 0) -> None:
        super().__init__(dim, bits, scale, "token", seed=seed)
        self._state = {}
        self._bases = Bases(dim, center, first=True)
        self.fields = (*self.fields, *self._bases.fields)
        self.group = center or LEARNT_FROM
        self.learns_from = max(LEARNT_FROM, center)
        self.max_norm = self._longest(False)  # nothing is a base, so no token gets longer

    def learn(self, x: Tensor, context: Context) -> TurboQuantKeyCodec:
        """Return a codec that learnt from the first tokens of a cache."""
        return self.with_state(self._learn(x, context))

    def _learn(self, x: Tensor, context: Context | None = None) -> dict[str, Tensor]:
        return {"first": first_key(self.transform.forward(x), context or Context())}

    def _check_state(self, state: Mapping[str, Tensor]) -> None:
        self._check(set(state) == {"first"}, ", ".join(sorted(state)))
        first = state["first"]
        good = first.dim() == 2 and first.shape[1] == self._dim and first.dtype is torch.float16
        self._check(good and bool(first.isfinite().all()), "first")

    def check_heads(self, heads: int) -> None:
        """Raise `FormatError` if the state is of another number of heads."""
        self._check(all(len(x) == heads for x in self._state.values()), f"not of {heads} heads")

    def state_bytes(self, heads: int) -> int:
        """Return the bytes of the first key."""
        return 2 * self._dim * heads

    def encode(self, x: Tensor, frozen: Arrays | None = None) -> dict[str, Tensor]:
        """Rotate, choose bases, round what is left; learn the first key if there is none yet."""
        if not self.fitted:
            self._set(self._learn(x))
        return self._encode(x, frozen)

    def _encode(self, x: Tensor, frozen: Arrays | None = None) -> dict[str, Tensor]:
        y, first = self.transform.forward(x), self._state["first"].to(torch.float32)
        base, flag, side = self._bases.choose(y, first, torch.ones_like(first), frozen)
        return rounded(self.form, y - base) | flag | side

    def decode(self, arrays: Arrays) -> Tensor:
        """Undo all but the rotation."""
        self.require_fitted()
        return self._decode(arrays)

    def _decode(self, arrays: Arrays) -> Tensor:
        return self._bases.add(
            FormCodec.decode(self, arrays), arrays, self._state["first"].to(torch.float32)
        )

    def packed_format(self) -> None:
        """No kernel adds bases to codes of a codebook."""

    def encoding(self) -> None:
        """No kernel takes bases off before a codebook."""
