"""The work of `anchors.py`, and what a peer is."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from attend_calls import copies
from torch import Tensor

Ring = list[Callable[[], Tensor]]
"""A call for each copy of what is held; it returns `[queries, query heads, width]`."""
Maker = Callable[[int], Ring]
"""Makes the calls for a number of threads."""


@dataclass(frozen=True)
class Case:
    """Queries of the last tokens over all of K and V, `[heads, tokens, width]`, in fp32."""

    k: Tensor
    v: Tensor
    q: Tensor
    ring: int

    @property
    def new(self) -> int:
        """How many tokens have queries, the last ones."""
        return self.q.shape[1]

    @property
    def past(self) -> int:
        """How many tokens were held before them."""
        return self.k.shape[1] - self.new

    def mask(self) -> Tensor:
        """Return which token each query sees."""
        return torch.ones(self.new, self.k.shape[1], dtype=torch.bool).tril(self.past)

    def error(self, found: Tensor) -> float:
        """Return the norm of the difference to attention in fp64 over its norm, of 8 queries."""
        heads, dim = self.k.shape[0], self.k.shape[2]
        at = torch.linspace(0, self.new - 1, min(8, self.new)).long()
        rows = self.q[:, at].double().view(heads, -1, len(at), dim)
        scores = rows @ self.k.double().mT[:, None] * dim**-0.5
        scores = scores.masked_fill(~self.mask()[at], -torch.inf)
        wanted = (scores.softmax(-1) @ self.v.double()[:, None]).view(-1, len(at), dim)
        return float((found[at].double().transpose(0, 1) - wanted).norm() / wanted.norm())


def case_of(heads: int, groups: int, dim: int, past: int, new: int, ring: int) -> Case:
    """Return random K, V and queries."""
    draw = torch.Generator().manual_seed(past + new)
    k, v = (torch.randn(heads, past + new, dim, generator=draw) for _ in "kv")
    return Case(k, v, torch.randn(heads * groups, new, dim, generator=draw), ring)


def ring_of(case: Case, *held: Tensor) -> list[tuple[Tensor, ...]]:
    """Return K and V and as many copies of them as the ring needs."""
    count = copies(sum(x.nbytes for x in held), case.ring)
    return [held, *(tuple(x.clone() for x in held) for _ in range(count - 1))]
