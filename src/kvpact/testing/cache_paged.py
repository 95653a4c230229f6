"""`PagedCacheContract`: a method in kvpact's paged cache.

A pool is allocated at once and shared by caches that were forked, so what the kit says of memory
that comes and goes is said here of the pool instead; each such check says why.
"""

from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from kvpact.cache import create_cache
from kvpact.cache.layer.layer import CacheLayer
from kvpact.geometry import CacheGeometry
from kvpact.testing.cache import CacheContract
from kvpact.testing.cache_base import SMALL, in_pieces
from kvpact.testing.data import Shape, integers
from kvpact.testing.depends import depends_on


def _layer_tensors(layer: CacheLayer, path: str, row: int) -> dict[str, Tensor]:
    """Return the tensors of a row of a layer: used slots, exact copies, lengths, states."""
    found = {}
    for name, stream in (("k", layer.k), ("v", layer.v)):
        if stream is None:
            continue
        here = f"{path}.{name}"
        found[f"{here}.length"] = integers(stream.length, stream.packed)
        found[f"{here}.tail"] = stream.tail[row : row + 1]
        if stream.sinks is not None:
            found[f"{here}.sinks"] = stream.sinks[row : row + 1]
        for field in stream.codec.fields if stream.packed else ():
            segments = -(-stream.packed // stream.store.segment_tokens)
            units = stream.store.source().gather(field.name, 0, segments).clone()
            # What a shared page holds after `packed` is another sequence's.
            field.clear_from(units, stream.packed)
            used = -(-stream.packed // field.tokens)
            found[f"{here}.{field.name}"] = units[row : row + 1, :, :used]
        for learnt, tensor in stream.codec.state().items():
            found[f"{here}.state.{learnt}"] = tensor
    return found


class PagedCacheContract(CacheContract):
    """Inherit this and set `spec`: the whole of `CacheContract`, on pages.

    Attributes
    ----------
    num_pages : int
        Pages of the pool.
    """

    num_pages: ClassVar[int] = 64
    # Rows have views of their own, so a view has no single `Step`.
    operations = tuple(name for name in CacheContract.operations if name != "store")

    def make_cache(self, geometry: CacheGeometry, max_tokens: int | None = None) -> Any:
        """Return a view of a new pool, whose pages are its limit."""
        return self._view(geometry, self.num_pages)

    def _view(self, geometry: CacheGeometry, num_pages: int) -> Any:
        options = self.options(geometry)
        return create_cache(self.spec, geometry, layout="paged", num_pages=num_pages, **options)

    def limited(self) -> tuple[Any, int]:
        """Return a view of four pages, which hold two rows of two pages each."""
        cache = self._view(SMALL.geometry(2), 4)
        return cache, 2 * cache.cache.pool.page_size

    def held(self, cache: Any) -> dict[str, Tensor]:
        """Return the tensors of the rows of a view, whichever pages they stand on."""
        found: dict[str, Tensor] = {}
        for row, seq in enumerate(cache.seqs or ()):
            for index in range(cache.cache.geometry.num_layers):
                layer = cache.cache.layer_of(seq, index)
                found |= _layer_tensors(layer, f"{row}.{index}", 0)
                if layer.padding is not None:
                    found[f"{row}.{index}.padding"] = layer.padding
        return found

    def empty_bytes(self, cache: Any, geometry: CacheGeometry) -> int:
        """Return the bytes of an empty cache: its pool, and learnt states."""
        pool: int = sum(tensor.nbytes for tensor in cache.cache.pool.tensors())
        return pool + super().empty_bytes(cache, geometry)

    @depends_on("pages")
    def test_slots_are_those_of_the_contiguous_cache(self, shape: Shape) -> None:
        """Slot for slot, byte for byte, in every row; after a rollback, too."""
        geometry = shape.geometry()
        paged = self.make_cache(geometry)
        flat = create_cache(self.spec, geometry, **self.options(geometry))
        for part in in_pieces(self.tokens(shape, shape.tokens), shape.pieces):
            for cache in (paged, flat):
                self.append(cache, part)
        self._assert_same_slots(paged, flat)
        for cache in (paged, flat):
            cache.truncate(shape.tokens // 2 + 1)
        self._assert_same_slots(paged, flat)
        for cache in (paged, flat):
            self.append(cache, self.tokens(shape, 70, seed=1))
        self._assert_same_slots(paged, flat)

    def _assert_same_slots(self, paged: Any, flat: Any) -> None:
        rows: dict[str, Tensor] = {}
        for row in range(flat.batch_size):
            for index in range(flat.geometry.num_layers):
                rows |= _layer_tensors(flat.entry(index), f"{row}.{index}", row)
        self.assert_same(rows, paged)

    def test_reset_gives_all_pages_back(self) -> None:
        """An empty view holds no page, whatever it held."""
        cache = self.filled(SMALL, layers=2)
        assert cache.cache.num_free_pages < self.num_pages
        cache.reset()
        assert cache.cache.num_free_pages == self.num_pages

    def test_little_is_unused(self) -> None:
        """A pool is allocated before there are tokens; of its pages in use, little is unused."""
        cache = self._view(CacheGeometry(1, 1, 64, dtype=torch.float16), 160)
        shape = replace(SMALL, batch=1, heads=1, dim=64, v_dim=64, dtype=torch.float16)
        for seed, count in enumerate((4096, 1, 127, 1)):
            self.append(cache, self.tokens(shape, count, seed))
            size = cache.cache.pool.page_size
            used = cache.cache.num_pages - cache.cache.num_free_pages
            assert used == -(-cache.seq_len(0) // size)
            assert used * size <= 1.05 * cache.seq_len(0)
