"""Pages: one preallocated pool shared by all layers and sequences.

The bytes in a page are those of a segment of the contiguous cache.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable, Sequence
from functools import cached_property
from math import lcm
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kvpact.cache.checks import KeyOffsets
from kvpact.cache.layer.states import learnt_states
from kvpact.cache.memory import room_for
from kvpact.cache.stream.codecs import Calibration, layer_codecs, states_of
from kvpact.cache.stream.segments import SegmentStore, clear_segment
from kvpact.errors import CacheFull, GeometryError
from kvpact.formats import TILE
from kvpact.geometry import CacheGeometry, check_count
from kvpact.kernels import Segment, Where, WritableSource
from kvpact.methods import Codec
from kvpact.snapshot import Snapshot
from kvpact.spec import Spec

SIDES = ("k", "v")


class PagePool:
    """All pages, of a multiple of 32 tokens and of groups, their references, and the free ones."""

    def __init__(
        self,
        specs: list[Spec],
        geometry: CacheGeometry,
        num_pages: int,
        page_size: int | None,
        device: torch.device,
        calibration: Calibration | Snapshot | None = None,
        offsets: KeyOffsets | None = None,
    ) -> None:
        check_count("num_pages", num_pages, 1)
        if isinstance(calibration, Snapshot):
            calibration = learnt_states(calibration, specs, geometry, device)
        calibration = states_of(calibration, specs, geometry, device)
        self.codecs = layer_codecs(specs, geometry, calibration, offsets)
        codecs = [codec for pair in self.codecs for codec in pair]
        for codec in codecs:
            codec.require_fitted()  # what one sequence learnt could not be shared with others
        smallest = lcm(TILE, *(codec.group for codec in codecs))
        self.page_size = smallest if page_size is None else page_size
        check_count("page_size", self.page_size, 1)
        if self.page_size % smallest:
            raise GeometryError(f"page_size should be a multiple of {smallest}, not {page_size!r}")
        heads = geometry.num_kv_heads
        # [P, H, units, ...]: a field allocated for P "rows" of one page each.
        with room_for(f"{num_pages:,} pages of {self.page_size:,} tokens"):
            self.storage = [
                {
                    side: {
                        field.name: field.allocate(num_pages, heads, self.page_size, device)
                        for field in codec.fields
                    }
                    for side, codec in zip(SIDES, pair, strict=True)
                }
                for pair in self.codecs
            ]
            self.references = [0] * num_pages
        self.lock = threading.RLock()
        self._free = list(range(num_pages - 1, -1, -1))
        # False while references and free pages may not be what the tables of sequences say.
        self.counted = True
        self.changes = 0  # another number whenever references or free pages changed

    @property
    def num_pages(self) -> int:
        """Pages in all."""
        return len(self.references)

    @property
    def num_free(self) -> int:
        """Pages that nobody holds."""
        return len(self._free)

    def tensors(self) -> list[Tensor]:
        """Return the pool's tensors."""
        return [t for pair in self.storage for fields in pair.values() for t in fields.values()]

    def take(self, count: int, why: str) -> list[int]:
        """Return pages, zeroed, with one reference each; none is taken if `CacheFull` is raised."""
        with self.lock:
            if count > len(self._free):
                raise CacheFull(
                    f"{why}: {count} pages of {self.page_size} tokens wanted, {len(self._free)} of "
                    f"{self.num_pages} free; free a sequence or make a larger pool"
                )
            self.counted = self.counted and not count
            self.changes += 1
            pages = [self._free.pop() for _ in range(count)]
            for page in pages:
                self.references[page] = 1
            if pages:
                index = torch.tensor(pages, dtype=torch.int64, device=self.tensors()[0].device)
                for tensor in self.tensors():
                    tensor.index_fill_(0, index, 0)
            return pages

    def retain(self, page: int) -> None:
        """Add a reference."""
        with self.lock:
            self.counted = False
            self.changes += 1
            self.references[page] += 1

    def release(self, page: int) -> bool:
        """Take a reference away; True if that freed the page."""
        with self.lock:
            assert self.references[page] > 0, "a page was released twice"
            self.counted = False
            self.changes += 1
            self.references[page] -= 1
            if self.references[page]:
                return False
            self._free.append(page)
            return True

    def recount(self, tables: Iterable[Sequence[int]]) -> None:
        """Count references again from the tables of all sequences, after an interrupted call."""
        with self.lock:
            self.changes += 1
            counts = Counter(page for table in tables for page in table)
            self.references = [counts[page] for page in range(self.num_pages)]
            free = range(self.num_pages - 1, -1, -1)
            self._free = [page for page in free if not counts[page]]
            self.counted = True

    def copy(self, source: int, target: int) -> None:
        """Copy a page, all layers of it."""
        for tensor in self.tensors():
            tensor[target] = tensor[source]

    def clear(self, page: int, layer: int, side: int, start: int) -> None:
        """Zero what a page holds of its tokens from `start` on, for K (0) or V (1) of a layer."""
        if start < self.page_size:
            fields = self.storage[layer][SIDES[side]]
            segment = {name: tensor[page : page + 1] for name, tensor in fields.items()}
            clear_segment(self.codecs[layer][side], segment, max(start, 0))


class PageStore(SegmentStore):
    """The store of one sequence's pages in one stream; its cache alone changes the `table`."""

    def __init__(self, pool: PagePool, codec: Codec, fields: Segment, table: list[int]) -> None:
        self._pool, self._codec, self._fields, self._table = pool, codec, fields, table
        self.segment_tokens = pool.page_size
        self._source: PageSource | None = None

    def grown(self, tokens: int, kept: int) -> PageStore:
        """Return itself: pages are reserved for all layers before a stream appends."""
        pages = -(-tokens // self.segment_tokens)
        if pages > len(self._table):
            raise CacheFull(f"{pages} pages needed, {len(self._table)} reserved; call reserve")
        return self

    def writable(self, tokens: int, kept: int) -> int:
        """Write up to the first page that somebody else holds, too."""
        size = self.segment_tokens
        for index in range(kept // size, -(-tokens // size)):
            if self._pool.references[self._table[index]] > 1:
                return min(index * size, tokens)
        return tokens

    def clear_from(self, tokens: int) -> bool:
        """Zero the slots from `tokens` on; False if some are on pages that others hold, too."""
        size, clean, source = self.segment_tokens, True, self.source()
        for index in range(tokens // size, len(self._table)):
            if self._pool.references[self._table[index]] == 1:
                clear_segment(self._codec, source.segment(index), max(tokens - index * size, 0))
            else:
                clean = clean and tokens >= (index + 1) * size
        return clean

    def source(self) -> WritableSource:
        """Return the pages as they are now."""
        pages = tuple(self._table)
        if self._source is None or self._source.pages != pages:
            self._source = PageSource(self._fields, pages, self.segment_tokens)
        return self._source


class PageSource:
    """Reads a sequence's `pages` where they lie, in fields `[P, H, units, …]` without gaps."""

    def __init__(self, fields: Segment, pages: tuple[int, ...], page_size: int) -> None:
        self._fields, self.pages, self.segment_tokens = fields, pages, page_size
        self._where: dict[str, Where | None] = {}
        self.prepared: dict[str, Any] = {}

    @cached_property
    def _index(self) -> np.ndarray[Any, Any]:
        return np.array(self.pages, dtype=np.int64)

    def segment(self, index: int) -> Segment:
        """Return one of the pages, in the sequence's order, as views."""
        page = self.pages[index]
        return {name: tensor[page : page + 1] for name, tensor in self._fields.items()}

    def gather(self, name: str, first: int, last: int) -> Tensor:
        """Return a field's units of the pages `first <= i < last`, in the sequence's order."""
        tensor = self._fields[name]
        pages = torch.tensor(self.pages[first:last], dtype=torch.int64, device=tensor.device)
        return tensor.index_select(0, pages).transpose(0, 1).flatten(1, 2).unsqueeze(0)

    def where(self, name: str) -> Where | None:
        """Return where a field's pages lie; there is one row."""
        if name not in self._where:
            tensor = self._fields[name]
            size = tensor.element_size()
            segments = self._index * (tensor.stride(0) * size) + tensor.data_ptr()
            found = Where(segments[None], 0, 0, tensor.stride(1) * size)
            self._where[name] = found if tensor[0, 0].is_contiguous() else None
        return self._where[name]
