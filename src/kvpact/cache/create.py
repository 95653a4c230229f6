"""Caches by spec and layout."""

from __future__ import annotations

from kvpact.cache.contiguous import ContiguousCache
from kvpact.errors import GeometryError, SpecError
from kvpact.geometry import CacheGeometry
from kvpact.kernels.dispatch import choose
from kvpact.recipe import SpecLike, layer_specs


def create_cache(
    spec: SpecLike,
    geometry: CacheGeometry,
    layout: str = "contiguous",
    *,
    max_tokens: int | None = None,
    kernel: str = "auto",
) -> ContiguousCache:
    """Make a compressed KV cache.

    Parameters
    ----------
    spec : str, Spec, path or mapping
        A spec such as ``turboquant:bits=4``, or a recipe with a spec per layer (see
        `kvpact.recipe`).
    geometry : CacheGeometry
        Shape of K and V.
    layout : {"contiguous"}
        How sequences lie in memory.
    max_tokens : int, optional
        Tokens per layer after which `CacheFull` is raised; no limit if omitted.
    kernel : {"auto", "torch"}
        What computes; ``auto`` takes the best that is there.

    Returns
    -------
    ContiguousCache
        A `CompressedKVCache`.

    Raises
    ------
    SpecError
        The spec, the recipe or the layout is not known.
    GeometryError
        `max_tokens` is no positive number.
    BackendUnavailable
        The kernel asked for can't run.
    """
    choose(kernel)
    if layout != "contiguous":
        raise SpecError(f"layout {layout!r} is not known; there is 'contiguous'")
    if max_tokens is not None and (not isinstance(max_tokens, int) or max_tokens < 1):
        raise GeometryError(f"max_tokens should be a positive number, not {max_tokens!r}")
    return ContiguousCache(layer_specs(spec, geometry.num_layers), geometry, max_tokens)
