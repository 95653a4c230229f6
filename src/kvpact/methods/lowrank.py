"""Low rank: vectors as coefficients on the principal directions of the first tokens.

The truncated SVD `X ~ (X Q) Q^T` has the least error of all matrices of rank r; the columns of Q,
`[D, r]`, are the r leading right singular vectors of X. With ``per_head=true`` each head has its
own Q, so data of rank r in each head come back exactly (and so does a matrix `[T, H * D]` of rank
r). With ``per_head=false`` all heads of the layer share one Q, fitted to `[T * H, D]`, which takes
H times fewer bytes.

Coefficients keep the input's dtype; Q is fp16 for 16-bit input and fp32 otherwise. Where the rank
is the width, Q is left out: it would be a rotation that changes nothing. Bits per value: b r / D,
where b is the bits of a number of the input; Q comes on top. Low rank for KV caches is also the
idea of ShadowKV (arXiv:2410.21465) and Palu (arXiv:2407.21118).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kvpact.formats import Order, TokenField
from kvpact.methods.base import Arrays, Codec
from kvpact.methods.fitted import FittedCodec, FittedMethod
from kvpact.quantizers.numbers import cast
from kvpact.transforms.subspace import expand, principal_directions, project


class LowRankCodec(FittedCodec):
    """Coefficients on a frozen basis. `rank`, `energy`, `per_head`: as in `LowRank`."""

    def __init__(
        self, dim: int, rank: int, energy: float, per_head: bool, dtype: torch.dtype
    ) -> None:
        super().__init__(dim)
        self._energy, self._per_head, self._dtype = energy, per_head, dtype
        # With `energy` the rank is known once the codec is fitted; before, it is at most the width.
        self._least = self.rank = dim if energy else min(rank, dim)
        self.fields = (self._field(),)

    def _field(self) -> TokenField:
        return TokenField("coefficients", self.rank, self._dtype, "codes")

    @property
    def lost(self) -> float:
        """Share of the calibration tokens' energy that the basis does not hold."""
        self.require_fitted()
        return float(self._state["lost"])

    def state_bytes(self, heads: int) -> int:
        """Return the bytes of the basis and of the share lost; with `energy` of the latter."""
        width = torch.float32.itemsize if self._dtype is torch.float32 else torch.float16.itemsize
        basis = (heads if self._per_head else 1) * self._dim * self.rank * width
        return torch.float32.itemsize + (basis if self.rank < self._dim else 0)

    @property
    def unplanned(self) -> str:
        """With `energy` the tokens decide on the rank."""
        if not self._energy or self.fitted:
            return ""
        return "lowrank: the tokens decide on the rank (energy=); counted is the full width"

    def _factor(self, directions: Tensor) -> Tensor:
        return directions.to(torch.float32 if self._dtype is torch.float32 else torch.float16)

    def _learn(self, x: Tensor) -> dict[str, Tensor]:
        energy, directions = principal_directions(x, self._per_head)
        total = energy.sum().clamp(min=torch.finfo(energy.dtype).tiny)
        kept = energy.sum(0).cumsum(0) / total
        rank = self.rank
        if self._energy:
            rank = min(int((kept < self._energy).sum()) + 1, self._dim)
        lost = (1 - kept[rank - 1]).clamp(min=0).to(torch.float32)
        if rank == self._dim:
            return {"lost": torch.zeros_like(lost)}
        return {"lost": lost, "basis": self._factor(directions[..., :rank]).contiguous()}

    def _check_state(self, state: Mapping[str, Tensor]) -> None:
        self._check({"lost"} <= set(state) <= {"lost", "basis"}, ", ".join(sorted(state)))
        lost = state["lost"]
        self._check(lost.shape == () and 0 <= float(lost) <= 1, "lost is no share")
        if "basis" not in state:
            self._check(self._least == self._dim and not lost, "the basis is missing")
        else:
            basis = state["basis"]
            good = basis.dim() == 3 and basis.is_floating_point() and basis.shape[1] == self._dim
            self._check(good and 1 <= basis.shape[2] <= self._dim, "shape of the basis")
            self._check(bool(torch.isfinite(basis).all()), "numbers of the basis")

    def _set(self, state: Mapping[str, Tensor]) -> None:
        super()._set(state)
        self.rank = state["basis"].shape[2] if "basis" in state else self._dim
        self.fields = (self._field(),)

    def _encode(self, x: Tensor, frozen: Arrays | None = None) -> dict[str, Tensor]:
        if "basis" in self._state:
            x = project(x, self._state["basis"])
        return {"coefficients": cast(x, self._dtype, "a coefficient")}

    def _decode(self, arrays: Arrays) -> Tensor:
        x = arrays["coefficients"].to(torch.float32)
        return expand(x, self._state["basis"]) if "basis" in self._state else x

    def extended(self, x: Tensor, bound: float | None = None) -> LowRankCodec:
        """Return a codec whose basis holds new tokens too; new directions follow the old ones.

        `bound`: share of their energy that may be lost; by default twice that of the first tokens
        and .1 %.
        """
        self.require_fitted()
        bound = 2 * self.lost + 1e-3 if bound is None else bound
        basis = self._state.get("basis")
        total = float(x.double().square().sum())
        if basis is None or total == 0:
            return self
        residual = x - expand(project(x, basis), basis)
        if float(residual.double().square().sum()) <= bound * total:
            return self
        energy, directions = principal_directions(residual, basis.shape[0] > 1)
        left = energy.sum() - energy.sum(0).cumsum(0)
        rank = basis.shape[2] + min(int((left > bound * total).sum()) + 1, self._dim)
        if rank >= self._dim:
            rank = self._dim  # all directions that are orthogonal to the basis
            directions = torch.linalg.qr(basis.double(), mode="complete")[0][..., basis.shape[2] :]
        new = self._factor(directions[..., : rank - basis.shape[2]])
        return self.restore({**self._state, "basis": torch.cat([basis, new], -1)})


@dataclass(frozen=True, kw_only=True)
class LowRank(FittedMethod):
    """Coefficients on the leading singular vectors of the first tokens.

    Parameters
    ----------
    rank : int
        Coefficients per vector, at most its width.
    energy : float
        Above 0, the smallest rank that keeps this share of the energy is taken in place of `rank`.
    per_head : bool
        A basis for each head, or one for all heads of a layer.
    """

    name: ClassVar[str] = "lowrank"
    examples: ClassVar[Mapping[str, float]] = {"lowrank:rank=16": 0.99, "lowrank:energy=0.9": 0.62}
    variants: ClassVar[Mapping[str, float]] = {
        "lowrank:rank=1000": 0.0003,
        "lowrank:rank=16,per_head=false,sinks=0,window=0": 0.99,
    }
    rank: int = 32
    energy: float = 0.0
    per_head: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check("rank", 1 <= self.rank <= 65_536, "a number from 1 to 65536")
        self.check("energy", 0 <= self.energy <= 1, "a number from 0 to 1")

    def codec(self, dim: int, dtype: torch.dtype, order: Order) -> Codec:
        """Return the codec for keys or for values, not fitted yet."""
        return LowRankCodec(dim, self.rank, self.energy, self.per_head, dtype)
