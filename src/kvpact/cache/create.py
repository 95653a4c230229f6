"""Caches by spec and layout."""

from __future__ import annotations

from collections.abc import Sequence

from kvpact.cache.batch.contiguous import ContiguousCache
from kvpact.cache.budget.budget import budget_of, ladder_of
from kvpact.cache.budget.cache import BudgetCache
from kvpact.cache.checks import KeyOffsets
from kvpact.cache.paged.cache import PagedKVCache
from kvpact.cache.paged.view import PagedView
from kvpact.cache.stream.codecs import Calibration, cache_specs
from kvpact.callable_package import tells_call
from kvpact.errors import GeometryError, SpecError
from kvpact.geometry import CacheGeometry, check_count
from kvpact.kernels import choose
from kvpact.recipe import SpecLike, layer_specs, sensitivities


@tells_call("create_cache(spec, CacheGeometry(num_layers, num_kv_heads, head_dim, dtype=...))")
def create_cache(
    spec: SpecLike,
    geometry: CacheGeometry,
    layout: str = "contiguous",
    *,
    max_tokens: int | None = None,
    backend: str = "auto",
    check: str = "now",
    num_pages: int | None = None,
    page_size: int | None = None,
    calibration: Calibration | None = None,
    key_offsets: KeyOffsets | None = None,
    budget: int | str | None = None,
    rungs: Sequence[SpecLike] | None = None,
    context: int | None = None,
) -> ContiguousCache | PagedView:
    """Make a compressed KV cache.

    Parameters
    ----------
    spec : str, Spec, path or mapping
        A spec such as ``turboquant:bits=4``, or a recipe with a spec per layer (see
        `kvpact.recipe`).
    geometry : CacheGeometry
        Shape of K and V; of latents with `CacheGeometry.mla` (see `MLACache`).
    layout : {"contiguous", "paged"}
        How sequences lie in memory. ``paged`` gives a view of a `PagedKVCache` of its own; for
        many sequences that come and go make a `PagedKVCache` and take views of it.
    max_tokens : int, optional
        Tokens per layer after which `CacheFull` is raised; no limit if omitted.
    backend : {"auto", "cpu", "triton", "torch"}
        Who computes: the native kernels (``cpu``), or torch. By name a backend computes everything
        or raises; ``auto`` takes for each operation the first one that covers it.
        ``stats()["compute"]`` tells what ran, and why.
    check : {"now", "deferred"}
        When tokens are checked for NaN, infinity and numbers beyond the method's range: before
        they are stored (``now``), so that the cache stays as it was; or with a flag that stays on
        the device and is read by `verify`, `stats`, `snapshot` and `dequantize` (``deferred``), so
        that no step makes the host wait for a GPU. Shapes, dtypes and devices are always checked.
    num_pages, page_size : int, optional
        Of the pool, with ``layout="paged"`` (see `PagedKVCache`).
    calibration : Calibration or mapping, optional
        For methods that learn from tokens (low rank, vector quantisation, `pca`, keys of
        `trellis`): what they learnt of the model (``kvpact calibrate``), or layer -> K and V,
        `[B, H_kv, T, D]`, or the states of codecs that learnt before. Without it a contiguous cache
        learns from its first tokens; pages need it.
    key_offsets : mapping, optional
        Layer -> `KeyOffset`: what its keys have by their positions alone, the bias of the key
        projection turned by RoPE. It is taken off before keys are encoded and is in every result
        again, so that a large bias costs no precision. The numbers are the model's: they are
        counted in no cache's bytes. Exact methods (``none``) have no use for it.

    budget : int or str, optional
        Bytes (``"200MB"``) that the cache never exceeds, of a contiguous one; or a share
        (``"25%"``) of what one row takes in 16 bits with `context` tokens. It begins with
        `spec`. Where that would take more, the K or the V of a layer, one after the other, is
        compressed again by a next rung, in the same call (`kvpact.cache.budget.ladder`). At the
        last rung `BudgetExceeded` is raised; ``stats()["budget"]`` tells at how many tokens. A
        recipe with a ``ladder`` says which ones cost least; without one all count the same.
    rungs : sequence of specs, optional
        The ladder, from the most bytes to the fewest, in place of `spec` and of ``trellis`` with 6,
        4, 3 and 2 bits where these are fewer.
    context : int, optional
        Tokens at which a budget is a share of the exact cache.

    Returns
    -------
    ContiguousCache or PagedView
        A `CompressedKVCache`.

    Raises
    ------
    SpecError
        The spec, the recipe or the layout is not known.
    GeometryError
        `max_tokens` is no positive number; calibration tokens or key offsets of another shape than
        the cache's.
    BackendUnavailable
        The backend asked for can't run here, or does not cover the spec's methods.
    BudgetExceeded
        A few tokens would take more (where the batch is not known before, raised by a call).
    """
    compute = choose(backend, check)
    if layout not in ("contiguous", "paged"):
        raise SpecError(f"layout {layout!r} is not known; there are 'contiguous' and 'paged'")
    if max_tokens is not None:
        check_count("max_tokens", max_tokens, 1)
    if budget is None and (rungs is not None or context is not None):
        raise SpecError("rungs and context go with a budget")
    if layout == "paged":
        if budget is not None:
            raise SpecError("a budget is for contiguous caches; a pool has num_pages")
        if num_pages is None or max_tokens is not None:
            raise GeometryError("layout 'paged' takes num_pages (and page_size), not max_tokens")
        return PagedKVCache(
            spec,
            geometry,
            num_pages,
            page_size,
            calibration=calibration,
            key_offsets=key_offsets,
            backend=backend,
            check=check,
        ).view()
    if num_pages is not None or page_size is not None:
        raise GeometryError("num_pages and page_size go with layout='paged'")
    specs = cache_specs(spec, geometry)
    if budget is not None:
        layers, exact = geometry.num_layers, None
        if context is not None:
            check_count("context", context, 1)
            widths = geometry.head_dim + geometry.value_dim
            exact = 2 * context * layers * geometry.num_kv_heads * widths
        order = sensitivities(spec, layers)
        ladder = ladder_of(layer_specs(spec, layers), rungs, layers)
        given = budget_of(budget, ladder, order, exact)
        given.refuse(calibration=calibration)
        given = given.for_geometry(geometry)
        specs = list(given.rungs[0])
        return BudgetCache(given, specs, geometry, max_tokens, None, compute, key_offsets)
    return ContiguousCache(specs, geometry, max_tokens, calibration, compute, key_offsets)
