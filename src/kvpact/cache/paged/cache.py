"""The paged cache: many sequences of unlike length on one pool of pages with packed slots."""

from __future__ import annotations

from collections.abc import Sequence
from typing import SupportsIndex

import torch

from kvpact.cache.checks import KeyOffsets, check_offsets
from kvpact.cache.modes import detached
from kvpact.cache.paged.pool import PagePool
from kvpact.cache.paged.sequences import PagedSequences
from kvpact.cache.paged.view import PagedView
from kvpact.cache.stream.codecs import Calibration, cache_specs
from kvpact.callable_package import tells_names
from kvpact.errors import GeometryError, SnapshotError
from kvpact.geometry import CacheGeometry
from kvpact.kernels import check_covered, choose
from kvpact.recipe import SpecLike
from kvpact.snapshot import Snapshot
from kvpact.spec import Spec

_MEANT = {
    **dict.fromkeys(("add_sequence", "alloc", "new_sequence"), "seq = cache.allocate()"),
    **dict.fromkeys(("__getitem__", "attend"), "cache.view(seqs).attend(layer, q=q, k=k, v=v)"),
    **dict.fromkeys(("get_seq_length", "num_tokens"), "cache.seq_len(seq)"),
    **dict.fromkeys(("delete", "release", "remove"), "cache.free(seq)"),
    "save": "cache.snapshot(seqs).save(path)",
}


@tells_names(_MEANT, "PagedKVCache(spec, CacheGeometry.from_config(model.config), num_pages)")
class PagedKVCache(PagedSequences):
    """Sequences on pages of packed slots.

    Parameters
    ----------
    spec : str, Spec, path, mapping or sequence
        A spec, or a recipe with a spec per layer; or a sequence of `Spec`, one per layer.
    geometry : CacheGeometry
        Shape of K and V. Its dtype (fp32 if it has none) is that of the tokens to come.
    num_pages : int
        Pages in the pool; all memory for slots is taken here, once.
    page_size : int, optional
        Tokens per page: a multiple of 32 and of the methods' groups, their least common multiple
        if omitted.
    device : torch.device or str
        Where the pool lives.
    calibration : Calibration, Snapshot or mapping, optional
        What methods that learn from tokens learnt, once, for all sequences: a model's calibration
        (``kvpact calibrate``), layer -> K and V, `[B, H_kv, T, D]`, to learn from, or the states of
        codecs that learnt before. Such methods can't be paged without. A `Snapshot` gives what the
        cache that it is from had learnt.
    backend, check : str
        Who computes, and when tokens are checked (see `create_cache`).
    key_offsets : mapping, optional
        Layer -> `KeyOffset` (see `create_cache`).

    Notes
    -----
    A sequence's sinks and window are exact copies outside the pages. Calls for different
    layers may run in parallel, calls for one layer take turns; `reserve` (which `append` calls)
    takes the pages of all layers at once, under the pool's lock. What changes whole sequences
    (`truncate`, `fork`, `free`, `restore`, `snapshot`) waits for the calls of all layers.
    """

    @detached
    def __init__(
        self,
        spec: SpecLike | Sequence[Spec],
        geometry: CacheGeometry,
        num_pages: int,
        page_size: int | None = None,
        device: torch.device | str = "cpu",
        calibration: Calibration | Snapshot | None = None,
        backend: str = "auto",
        check: str = "now",
        key_offsets: KeyOffsets | None = None,
    ) -> None:
        compute = choose(backend, check)
        specs, place = cache_specs(spec, geometry), torch.device(device)
        if not geometry.head_dim:
            raise GeometryError("pages hold K and V: head_dim should be 1 or more")
        offsets = check_offsets(key_offsets, geometry)
        check_covered(compute, specs, geometry, bool(offsets))
        pool = PagePool(specs, geometry, num_pages, page_size, place, calibration, offsets)
        super().__init__(specs, geometry, pool, place, compute, offsets)

    def __reduce_ex__(self, protocol: SupportsIndex) -> str:
        """Refuse pickling and copying: locks and addresses are part of this."""
        raise SnapshotError(
            "a PagedKVCache can't be pickled or copied: snapshot(seqs) can be saved and restored, "
            "fork(seq) copies a sequence"
        )

    def view(self, seqs: Sequence[int] | None = None) -> PagedView:
        """Return sequences as the rows of one `CompressedKVCache` (new ones if None)."""
        return PagedView(self, seqs)
