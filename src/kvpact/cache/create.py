"""Caches by spec and layout."""

from __future__ import annotations

from kvpact.cache.contiguous import ContiguousCache
from kvpact.cache.paged import PagedKVCache
from kvpact.cache.paged_view import PagedView
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
    num_pages: int | None = None,
    page_size: int | None = None,
) -> ContiguousCache | PagedView:
    """Make a compressed KV cache.

    Parameters
    ----------
    spec : str, Spec, path or mapping
        A spec such as ``turboquant:bits=4``, or a recipe with a spec per layer (see
        `kvpact.recipe`).
    geometry : CacheGeometry
        Shape of K and V.
    layout : {"contiguous", "paged"}
        How sequences lie in memory. ``paged`` gives a view of a `PagedKVCache` of its own; for
        many sequences that come and go make a `PagedKVCache` and take views of it.
    max_tokens : int, optional
        Tokens per layer after which `CacheFull` is raised; no limit if omitted.
    kernel : {"auto", "torch"}
        What computes; ``auto`` takes the best that is there.

    num_pages, page_size : int, optional
        Of the pool, with ``layout="paged"`` (see `PagedKVCache`).

    Returns
    -------
    ContiguousCache or PagedView
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
    if layout not in ("contiguous", "paged"):
        raise SpecError(f"layout {layout!r} is not known; there are 'contiguous' and 'paged'")
    if max_tokens is not None and (not isinstance(max_tokens, int) or max_tokens < 1):
        raise GeometryError(f"max_tokens should be a positive number, not {max_tokens!r}")
    if layout == "paged":
        if num_pages is None or max_tokens is not None:
            raise GeometryError("layout 'paged' takes num_pages (and page_size), not max_tokens")
        return PagedKVCache(spec, geometry, num_pages, page_size).view()
    if num_pages is not None or page_size is not None:
        raise GeometryError("num_pages and page_size go with layout='paged'")
    return ContiguousCache(layer_specs(spec, geometry.num_layers), geometry, max_tokens)
