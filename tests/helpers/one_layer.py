"""One layer of random tokens, and the caches that hold it."""

from functools import cache

import torch
from torch import Tensor

import kvpact
from kvpact import AttendConfig, CacheGeometry
from kvpact.testing.specs import method_specs

METHODS = [
    *method_specs(fitted=False), "turboquant:bits=3,center=64", "turboquant:bits=3,mode=prod",
]  # fmt: skip


@cache
def unit_vectors(dim: int, seed: int = 0, count: int = 20_000) -> torch.Tensor:
    x = torch.randn(count, dim, generator=torch.Generator().manual_seed(1000 * seed + dim))
    return x / x.norm(dim=-1, keepdim=True)


def normal(*shape: int, seed: int = 0) -> Tensor:
    """Return N(0, 1) numbers, the same ones for the same arguments."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def kvq(tokens: int, dim: int = 64, batch: int = 1, heads: int = 2, groups: int = 2, seed: int = 0):
    """Return K and V `[batch, heads, tokens, dim]`, and Q with `groups` heads for each KV head."""
    k, v = (normal(batch, heads, tokens, dim, seed=seed + i) for i in (1, 2))
    return k, v, normal(batch, heads * groups, tokens, dim, seed=seed + 3)


def fill(spec: str, k: Tensor, v: Tensor, config: AttendConfig | None = None, **options):
    """Return a cache of one layer that holds tokens."""
    geometry = CacheGeometry(1, k.shape[1], k.shape[3], v.shape[3])
    cache = kvpact.create_cache(spec, geometry, **options)
    cache.prefill(0, k, v, None, config)
    return cache


def causal(queries: int, total: int) -> Tensor:
    """Return what the last `queries` of `total` tokens see, as a boolean mask."""
    return torch.ones(queries, total, dtype=torch.bool).tril(total - queries)


def shown(cache, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Return K and V as stored, seen past one more token of a fork."""
    result = cache.fork().prefill(0, k[:, :, :1], v[:, :, :1])
    return result.k[:, :, :-1], result.v[:, :, :-1]
