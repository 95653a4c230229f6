"""The work of `anchors.py`, and what a peer is; kvpact's caches, and torch over exact K and V."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from attend_calls import DTYPES, calls_of, copies, grouped, views_of
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from kvpact import CacheGeometry, create_cache

SPECS = ("int:bits=8", "int:bits=4", "turboquant:bits=4", "trellis:bits=4")
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


def makers(case: Case) -> dict[str, Maker]:
    """Return a maker of calls for torch in each dtype, and for each spec."""
    torches = {f"torch {name}": _torch(case, DTYPES[name]) for name in ("fp32", "bf16")}
    return torches | {spec: _ours(case, spec) for spec in SPECS}


def _torch(case: Case, dtype: torch.dtype) -> Maker:
    k, v, q = (x[None].to(dtype) for x in (case.k, case.v, case.q))
    rows, mask = q.view(1, k.shape[1], -1, q.shape[3]), case.mask()

    def call(k: Tensor, v: Tensor) -> Tensor:
        if case.new == 1:  # as products: what torch is fastest at for one query
            return grouped(rows, k, v).view(q.shape[1:]).transpose(0, 1)
        found = scaled_dot_product_attention(q, k, v, mask, enable_gqa=True)
        return found[0].transpose(0, 1)

    return lambda threads: [lambda pair=pair: call(*pair) for pair in ring_of(case, k, v)]


def _ours(case: Case, spec: str) -> Maker:
    geometry = CacheGeometry(1, case.k.shape[0], case.k.shape[2], dtype=torch.float32)
    cache = create_cache(spec, geometry, backend="cpu")
    k, v, q = (x[None] for x in (case.k, case.v, case.q))
    for start in range(0, case.past, 2048):
        end = min(start + 2048, case.past)
        cache.store(0, k=k[:, :, start:end], v=v[:, :, start:end])
    new = [x[:, :, case.past :].contiguous() for x in (k, v)]
    calls = calls_of(views_of(cache, case.ring), *new, q)

    def made(threads: int) -> Ring:
        return [lambda call=call: call()[0].transpose(0, 1) for call in calls]

    return made
