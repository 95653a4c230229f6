"""Low rank, then integers: coefficients on the principal directions, quantised per token.

`x ~ Q (sigma * c)`: Q holds the leading singular vectors (see `lowrank`); sigma is the root mean
square of each coefficient over the tokens that it was fitted to, and one more of equal
coefficients; c is rounded to integers of 4 or 8 bits, in groups of coefficients with one fp16 scale
each. Without sigma the strongest direction would set the scale of its whole group. Where the rank
is the width no Q is stored: the channels themselves are the coefficients, in the order of their
energy, so an outlier channel costs nothing but its sigma.

The strongest coefficients are held in fp16 where this pays. One more bit for all coefficients takes
off 3/4 of the error, so an exact coefficient, which costs 16 - b bits, has to take off more than
the same bits spent on all would; and all exact ones together cost at most a quarter of a bit per
coefficient.

Bits per value: (b + 16/group) r / D, with a group of at most r coefficients. The exact
coefficients, Q and sigma come on top.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kvpact.formats import Field, Order, TokenField
from kvpact.methods.base import Arrays, Codec
from kvpact.methods.fitted import FittedCodec, FittedMethod
from kvpact.methods.integer import integers
from kvpact.quantizers.numbers import half
from kvpact.transforms.subspace import check_heads, expand, principal_directions, project

_EXACT_BITS = 16
_MAX_EXTRA = 0.25


class HybridCodec(FittedCodec):
    """Quantised coefficients on a frozen basis."""

    def __init__(
        self, dim: int, rank: int, quant_bits: int, group: int, per_head: bool, order: Order
    ) -> None:
        super().__init__(dim)
        self._rank, self._per_head = min(rank, dim), per_head
        self._bits, self._group, self._order = quant_bits, group, order
        self._choose_fields(0)

    def _integers(self, exact: int) -> Codec:
        return integers(self._rank - exact, self._bits, self._group, False, self._order)

    def _choose_fields(self, exact: int) -> None:
        self._exact, self._inner = exact, self._integers(exact)
        fields: tuple[Field, ...] = self._inner.fields
        if exact:
            fields = (*fields, TokenField("exact", exact, torch.float16, "codes"))
        self.fields = fields

    def state_bytes(self, heads: int) -> int:
        """Return the bytes of the basis or order, of sigma, and of the exact ones' number."""
        heads = heads if self._per_head else 1
        table = self._dim * (self._rank if self._rank < self._dim else 1) * torch.float16.itemsize
        return heads * (table + self._rank * torch.float32.itemsize) + torch.int32.itemsize

    @property
    def unplanned(self) -> str:
        """The tokens decide on how many coefficients are exact."""
        if self.fitted:
            return ""
        return f"hybrid: exact coefficients, up to {_MAX_EXTRA} bits per coefficient, come on top"

    def _learn(self, x: Tensor) -> dict[str, Tensor]:
        state: dict[str, Tensor] = {}
        if self._rank < self._dim:
            energy, directions = principal_directions(x, self._per_head)
            state["basis"] = directions[..., : self._rank].to(torch.float16).contiguous()
        else:
            energy = x.double().square().sum((0, 2))
            energy = energy if self._per_head else energy.sum(0, keepdim=True)
            order = energy.argsort(dim=-1, descending=True, stable=True)
            energy, state["order"] = energy.gather(-1, order), order.to(torch.int16)
        count = x.shape[0] * x.shape[2] * (x.shape[1] // energy.shape[0])
        # One more token of equal coefficients: few tokens say nothing of most directions.
        mean = energy.mean(-1, keepdim=True) / count
        sigma = ((energy[:, : self._rank] + mean) / (count + 1)).sqrt().to(torch.float32)
        state["sigma"] = torch.where(sigma == 0, torch.ones_like(sigma), sigma)
        state["exact"] = torch.tensor(self._paying(x, state), dtype=torch.int32, device="cpu")
        return state

    def _paying(self, x: Tensor, state: Mapping[str, Tensor]) -> int:
        """Return how many of the leading coefficients are worth an exact copy."""
        c = self._coefficients(x, state)
        integers = self._integers(0)
        error = (integers.decode(integers.encode(c)) - c).double() * state["sigma"].unsqueeze(-2)
        per_coefficient = error.square().sum((0, 1, 2))
        cost = _EXACT_BITS - self._bits
        limit, exact = int(_MAX_EXTRA * self._rank / cost), 0
        while exact < limit:
            share = 0.75 * cost * float(per_coefficient[exact:].mean())
            if float(per_coefficient[exact]) <= share:
                break
            exact += 1
        return exact

    def _check_state(self, state: Mapping[str, Tensor]) -> None:
        table = "basis" if self._rank < self._dim else "order"
        self._check(set(state) == {table, "sigma", "exact"}, ", ".join(sorted(state)))
        heads, sigma, exact = state[table].shape[0], state["sigma"], state["exact"]
        self._check(sigma.shape == (heads, self._rank), "shape of sigma")
        self._check(bool((torch.isfinite(sigma) & (sigma > 0)).all()), "numbers of sigma")
        good = exact.shape == () and 0 <= int(exact) < self._rank
        self._check(good, "number of exact coefficients")
        if table == "basis":
            self._check(state[table].shape == (heads, self._dim, self._rank), "shape of the basis")
            self._check(bool(torch.isfinite(state[table]).all()), "numbers of the basis")
        else:
            order = state[table]
            channels = torch.arange(self._dim, dtype=torch.int64, device=order.device)
            good = order.shape == (heads, self._dim)
            self._check(good and bool((order.sort(-1)[0] == channels).all()), "order")

    def _set(self, state: Mapping[str, Tensor]) -> None:
        super()._set(state)
        self._choose_fields(int(state["exact"]))

    def _coefficients(self, x: Tensor, state: Mapping[str, Tensor]) -> Tensor:
        check_heads(state["sigma"], x)
        if "basis" in state:
            c = project(x, state["basis"])
        else:
            order = state["order"].long().unsqueeze(-2).expand(x.shape)
            c = x.gather(-1, order)
        return c / state["sigma"].unsqueeze(-2)

    def _encode(self, x: Tensor, frozen: Arrays | None = None) -> dict[str, Tensor]:
        c = self._coefficients(x, self._state)
        out = self._inner.encode(c[..., self._exact :])
        if self._exact:
            out["exact"] = half(c[..., : self._exact], "a coefficient over its sigma")
        return out

    def _decode(self, arrays: Arrays) -> Tensor:
        c = self._inner.decode(arrays)
        if self._exact:
            c = torch.cat([arrays["exact"].to(torch.float32), c], dim=-1)
        c = c * self._state["sigma"].unsqueeze(-2)
        if "basis" in self._state:
            return expand(c, self._state["basis"])
        check_heads(self._state["order"], c)
        back = self._state["order"].argsort(-1).unsqueeze(-2).expand(c.shape)
        return c.gather(-1, back)


@dataclass(frozen=True, kw_only=True)
class Hybrid(FittedMethod):
    """Coefficients on the leading singular vectors, rounded to integers of 4 or 8 bits.

    Parameters
    ----------
    rank : int
        Coefficients per vector, at most its width.
    quant_bits : {4, 8}
        Bits of a coefficient.
    group : int
        Coefficients that share a scale, at most all of them.
    per_head : bool
        A basis for each head, or one for all heads of a layer.
    """

    name: ClassVar[str] = "hybrid"
    examples: ClassVar[Mapping[str, float]] = {
        "hybrid:rank=32,quant_bits=4": 0.98,
        "hybrid:rank=1000,quant_bits=8": 0.0074,
    }
    variants: ClassVar[Mapping[str, float]] = {
        "hybrid:rank=1000,quant_bits=4": 0.13,
        "hybrid:rank=16,quant_bits=8,per_head=false/vq:codebook_size=16": 0.99,
    }
    rank: int = 32
    quant_bits: int = 4
    group: int = 64
    per_head: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check("rank", 1 <= self.rank <= 65_536, "a number from 1 to 65536")
        self.check_choice("quant_bits", (4, 8))
        self.check("group", self.group >= 1, "at least 1")

    def codec(self, dim: int, dtype: torch.dtype, order: Order) -> Codec:
        """Return the codec for keys or for values, not fitted yet."""
        return HybridCodec(dim, self.rank, self.quant_bits, self.group, self.per_head, order)
