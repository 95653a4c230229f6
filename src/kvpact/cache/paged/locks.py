"""Sequences, their pages, and the order in which locks are taken to change them."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial, wraps
from operator import methodcaller
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch
from torch import Tensor

from kvpact.cache.layer.layer import CacheLayer
from kvpact.cache.modes import detached
from kvpact.cache.paged.pool import PagePool, PageStore
from kvpact.cache.paged.sequence import KnownRows, PagedSequence, packed_tokens
from kvpact.cache.paged.sharing import PrefixTable
from kvpact.cache.stream.segments import MakeStore
from kvpact.errors import GeometryError, SequenceError
from kvpact.geometry import CacheGeometry, check_count
from kvpact.kernels import Compute, Hold
from kvpact.key_offset import KeyOffset
from kvpact.spec import Spec

P = ParamSpec("P")
T = TypeVar("T")
Pages = TypeVar("Pages", bound="SequencePages")


def alone(call: Callable[Concatenate[Pages, P], T]) -> Callable[Concatenate[Pages, P], T]:
    """Run a method, detached, while no other call is at work in any layer."""

    @detached
    @wraps(call)
    def run(self: Pages, /, *args: P.args, **options: P.kwargs) -> T:
        return self._alone(lambda: call(self, *args, **options))

    return run


class SequencePages:
    """The sequences of a paged cache and their pages, which belong to their tables.

    The package's README ("Locks") says in which order locks are taken.
    """

    layout = "paged"

    def __init__(
        self,
        specs: list[Spec],
        geometry: CacheGeometry,
        pool: PagePool,
        device: torch.device,
        compute: Compute,
        key_offsets: dict[int, KeyOffset],
    ) -> None:
        self.specs, self.geometry, self.pool = specs, geometry, pool
        self.device, self.compute, self.key_offsets = device, compute, key_offsets
        self.heap = Hold()
        self._dtype = geometry.dtype or torch.float32
        self._sequences: dict[int, PagedSequence] = {}
        self._next = 0
        self._prefixes = PrefixTable()
        # Sequences that a call under way ends: their pages go back, whatever happens to it.
        self._retired: list[PagedSequence] = []
        self.layer_locks = [threading.RLock() for _ in specs]
        # Layer -> the rows of its last quick step; under the layer's lock.
        self.known_rows: dict[int, KnownRows] = {}

    def _maker(self, layer: int, table: list[int]) -> MakeStore:
        fields = self.pool.storage[layer]
        return lambda codec, batch, heads, device, side: PageStore(
            self.pool, codec, fields[side], table
        )

    def _empty_layer(self, layer: int, table: list[int]) -> CacheLayer:
        """Return a layer of a sequence that has the pages of `table`."""
        return CacheLayer(
            self.specs[layer],
            self._maker(layer, table),
            self.pool.codecs[layer],
            self.geometry.latent,
            self.compute,
            self.layer_locks[layer],
            self.key_offsets.get(layer),
        )

    def _alone(self, action: Callable[[], T]) -> T:
        """Run `action` while no other call is at work in any layer, under the pool's lock."""
        taken: list[Any] = [None]
        release: Callable[[], object]
        # No interrupt is delivered within a call of C: a lock that is taken is in the list, and one
        # that is released is not. Where all are, releasing them again does nothing.
        release = partial(deque, map(methodcaller("release"), iter(taken.pop, None)), 0)
        try:
            try:
                taken.extend(filter(methodcaller("acquire"), self.layer_locks))
                return self._with_pages(action)
            finally:
                release()
        finally:
            release()

    def _with_pages(self, action: Callable[[], T]) -> T:
        """Run `action`, which moves pages, under the pool's lock."""
        with self.pool.lock:
            if self._retired or not self.pool.counted:
                self._recover()
            result = action()
            self._retired.clear()
            self.pool.counted = True
            return result

    def _recover(self) -> None:
        """Finish what an interrupted call began: what counts are the tables of the sequences."""
        known = list(self._sequences.values())
        for sequence in self._retired:
            if all(sequence is not other for other in known):
                sequence.end()
        self.pool.recount([sequence.table for sequence in known])
        self._prefixes.drop_unheld(self.pool.references)

    def _sequence(self, seq: int) -> PagedSequence:
        named = isinstance(seq, int) and not isinstance(seq, bool)
        found = self._sequences.get(seq) if named else None
        if found is None:
            known = named and 0 <= seq < self._next
            reason = "was freed" if known else "was never allocated"
            raise SequenceError(f"sequence {seq!r} {reason}")
        return found

    def _add(self, sequences: Sequence[PagedSequence]) -> list[int]:
        seqs = list(range(self._next, self._next + len(sequences)))
        self._next += len(seqs)
        self._sequences.update(zip(seqs, sequences, strict=True))
        return seqs

    def _change(self, sequence: PagedSequence, first: int) -> None:
        """Offer a sequence's own pages from `first` on no more: they are about to change."""
        for page in sequence.table[first:]:
            if self.pool.references[page] == 1:
                self._prefixes.drop(page)

    def _trim(self, sequence: PagedSequence, pages: int) -> None:
        while len(sequence.table) > pages:
            self.pool.counted = False
            self._release(sequence.table.pop())

    def _release(self, page: int) -> None:
        if self.pool.release(page):
            self._prefixes.drop(page)

    @detached
    def reserve(
        self, seqs: Sequence[int], tokens: int | Sequence[int], layer: int | None = None
    ) -> None:
        """Take all pages that these sequences need for `tokens` more tokens each, in all layers.

        Pages that a sequence shares and would write to are copied now. With `layer` the tokens are
        counted from that layer's end, else from the end of the shortest.

        Raises
        ------
        CacheFull
            The pool has too few; nothing is taken from it and no sequence changed.
        SequenceError
            An unknown or freed sequence, or one named twice.
        """
        counts = list(tokens) if isinstance(tokens, Sequence) else [tokens] * len(seqs)
        if len(counts) != len(seqs):
            raise GeometryError(f"{len(counts)} numbers of tokens for {len(seqs)} sequences")
        for count in counts:
            check_count("tokens", count)
        if len(set(seqs)) != len(seqs):
            raise SequenceError("a sequence is named twice in one call")
        self._with_pages(lambda: self._reserve(seqs, counts, layer))

    def _reserve(self, seqs: Sequence[int], counts: Sequence[int], layer: int | None) -> None:
        sequences = [self._sequence(seq) for seq in seqs]
        wanted = [
            self._needs(sequence, count, layer)
            for sequence, count in zip(sequences, counts, strict=True)
        ]
        total = sum(len(copies) + new for copies, new in wanted)
        pages = self.pool.take(total, f"{sum(counts)} tokens for {len(seqs)} sequences")
        for sequence, count, (copies, new) in zip(sequences, counts, wanted, strict=True):
            for index in copies:
                self._replace(sequence, index, pages.pop())
            if count:
                self._change(sequence, sequence.packed // self.pool.page_size)
            sequence.table += [pages.pop() for _ in range(new)]

    def _needs(
        self, sequence: PagedSequence, tokens: int, layer: int | None
    ) -> tuple[list[int], int]:
        """Return the places of the table whose pages have to be copied, and the new pages."""
        size, table = self.pool.page_size, sequence.table
        # Layers are at unlike lengths while a step goes through the model: the shortest has most
        # to write, the longest may have these tokens already.
        layers = sequence.layers if layer is None else [sequence.layers[layer]]
        shortest = min(entry.length for entry in layers)
        new = max(-(-(shortest + tokens) // size) - len(table), 0)
        first = min(packed_tokens(entry) for entry in layers) // size
        streams = [stream for entry in layers for stream in entry.streams()]
        copies = [
            index
            for index in range(first, len(table))
            if self.pool.references[table[index]] > 1
            and any(stream.room_before(index * size) < tokens for stream in streams)
        ]
        return copies if tokens else [], new

    def _replace(self, sequence: PagedSequence, index: int, page: int) -> None:
        old, start = sequence.table[index], index * self.pool.page_size
        self.pool.copy(old, page)
        for number, layer in enumerate(sequence.layers):
            for side, stream in enumerate(layer.streams()):
                self.pool.clear(page, number, side, stream.packed - start)
            layer.outdate()  # unread results would read a page that is no longer this one's
        sequence.table[index] = page
        self._release(old)

    def block_table(self, seqs: int | Sequence[int]) -> Tensor:
        """Return pages: int32 `[N, pages]`, -1 after a row's end; `[pages]` for one sequence."""
        tables = [self._sequence(s).table for s in ([seqs] if isinstance(seqs, int) else seqs)]
        width = max((len(table) for table in tables), default=0)
        rows = [table + [-1] * (width - len(table)) for table in tables]
        result = torch.tensor(rows, dtype=torch.int32, device=self.device).view(len(rows), width)
        return result[0] if isinstance(seqs, int) else result
