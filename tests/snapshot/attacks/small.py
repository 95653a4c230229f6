"""A snapshot small enough that every one of its bits can be flipped."""

import torch

from kvpact import CacheGeometry, Snapshot, create_cache
from kvpact.snapshot import Identity

SPEC = "int:bits=4,sinks=1,window=2"
GEOMETRY = CacheGeometry(2, 1, 4)
TOKENS = 67
"""Two pages of packed ones, and a tail."""


def tokens(count: int, seed: int = 0, rows: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    k, v = (torch.randn(rows, 1, count, 4, generator=generator).half() for _ in range(2))
    return k, v


def small_snapshot() -> Snapshot:
    cache = create_cache(SPEC, GEOMETRY)
    for layer in range(2):
        cache.prefill(layer, *tokens(TOKENS, layer))
    identity = Identity(model="m", tenant="t")
    return cache.snapshot(token_ids=torch.arange(TOKENS), identity=identity, page_size=32)
