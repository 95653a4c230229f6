"""Small caches filled with tokens whose K and V follow from the token ids before them."""

import pytest
import torch

from kvpact import CacheGeometry, MLACache, PagedKVCache, PrefixCache, create_cache

GEOMETRY = CacheGeometry(2, 2, 32, 16, torch.float32)
LATENT = CacheGeometry.mla(2, 32, 16, torch.float32)


def kv(ids, layer, geometry=GEOMETRY):
    """K and V, `[1, H, T, D]`, that depend on layer, token and all tokens before it."""
    state = torch.cumsum(torch.tensor(ids, dtype=torch.float64) * 0.37 + 1 + layer, 0)
    heads = geometry.num_kv_heads
    axes = (torch.arange(heads * d, dtype=torch.float64) + 1 for d in
            (geometry.head_dim, geometry.value_dim))  # fmt: skip
    return tuple(
        torch.sin(state[:, None] * axis).float().view(len(ids), heads, -1).movedim(1, 0)[None]
        for axis in axes
    )


def fill(cache, ids, start=0, seq=None):
    """Store the tokens from `start` on."""
    geometry = cache.cache.geometry if hasattr(cache, "cache") else cache.geometry
    for layer in range(geometry.num_layers):
        k, v = (x[:, :, start:] for x in kv(ids, layer, geometry))
        if seq is None:
            cache.prefill(layer, k, v)
        else:
            cache.append(layer, {seq: (k[0], v[0])})
    return cache


def prefix(store, cache, **options):
    return PrefixCache(store, cache, **{"model": "a model", **options})


def calibration(seed=0):
    generator = torch.Generator().manual_seed(seed)

    def random(width):
        return torch.randn(1, 2, 300, width, generator=generator)

    return {layer: (random(32), random(16)) for layer in range(2)}


@pytest.fixture
def ids():
    """300 token ids."""
    return torch.randint(0, 1000, (300,), generator=torch.Generator().manual_seed(1)).tolist()


@pytest.fixture
def make():
    """Return a function that makes an empty cache of a layout."""

    def of(spec, layout="contiguous", fitted=None):
        if layout == "latent":
            return MLACache(spec, 2, 32, 16, dtype=torch.float32)
        if layout == "paged":
            return PagedKVCache(spec, GEOMETRY, 40, calibration=fitted)
        room = {"num_pages": 40} if layout == "view" else {}
        layout = "paged" if room else "contiguous"
        return create_cache(spec, GEOMETRY, layout, calibration=fitted, **room)

    return of
