"""The paged cache: many sequences of unlike length on one pool of pages with packed slots."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kvpact.cache.block_tables import BlockTables
from kvpact.cache.checks import check_layer, check_tokens
from kvpact.cache.codecs import Calibration
from kvpact.cache.layer import CacheLayer, MakeStore
from kvpact.cache.paged_step import PagedStep
from kvpact.cache.pages import PagePool, PageStore
from kvpact.cache.prefixes import PrefixTable, SharedPage, page_keys
from kvpact.cache.saved_pages import PagedSnapshots
from kvpact.cache.sequences import PagedSequence, distinct_bytes, packed_tokens
from kvpact.cache.specs import cache_specs
from kvpact.cache.stats import paged_stats
from kvpact.contract import AttendConfig
from kvpact.errors import GeometryError, SequenceError
from kvpact.geometry import CacheGeometry
from kvpact.kernels import check_covered, choose
from kvpact.recipe import SpecLike
from kvpact.snapshot import Snapshot
from kvpact.spec import Spec

if TYPE_CHECKING:
    from kvpact.cache.paged_view import PagedView


class PagedKVCache(BlockTables, PagedSnapshots):
    """Sequences on pages of packed slots.

    Parameters
    ----------
    spec : str, Spec, path, mapping or sequence
        A spec, or a recipe with a spec per layer; a sequence of `Spec`s, one per layer.
    geometry : CacheGeometry
        Shape of K and V. Its dtype (fp32 if it has none) is that of the tokens to come.
    num_pages : int
        Pages in the pool; all memory for slots is taken here, once.
    page_size : int, optional
        Tokens per page: a multiple of 32 and of the methods' groups, their least common multiple
        if omitted.
    device : torch.device or str
        Where the pool lives.
    calibration : mapping, optional
        Layer -> K and V, `[B, H_kv, T, D]`: what methods that learn from tokens (low rank, vector
        quantisation) learn, once, for all sequences; or the states of codecs that learnt before.
        Such methods can't be paged without. A `Snapshot` gives what the cache that it is from had
        learnt.
    backend, precision : str
        Who computes, and how (see `create_cache`).

    Notes
    -----
    A sequence's sinks and window are exact copies of its own, beside the pages. Calls for different
    layers may run in parallel, calls for one layer take turns; `reserve` (which `append` calls)
    takes the pages of all layers at once, under the pool's lock.
    """

    layout = "paged"

    def __init__(
        self,
        spec: SpecLike | Sequence[Spec],
        geometry: CacheGeometry,
        num_pages: int,
        page_size: int | None = None,
        device: torch.device | str = "cpu",
        calibration: Calibration | Snapshot | None = None,
        backend: str = "auto",
        precision: str = "full",
    ) -> None:
        self.compute = choose(backend, precision)
        self.geometry, self.device = geometry, torch.device(device)
        self._dtype = geometry.dtype or torch.float32
        self.specs = cache_specs(spec, geometry)
        check_covered(self.compute, self.specs, geometry)
        self.pool = PagePool(self.specs, geometry, num_pages, page_size, self.device, calibration)
        self._sequences: dict[int, PagedSequence] = {}
        self._next = 0
        self._prefixes = PrefixTable()
        self._layer_locks = [threading.RLock() for _ in self.specs]

    @property
    def token_geometry(self) -> CacheGeometry:
        """The geometry with the dtype that tokens have to be of."""
        return replace(self.geometry, dtype=self._dtype)

    def _maker(self, layer: int, table: list[int]) -> MakeStore:
        fields = self.pool.storage[layer]
        return lambda codec, batch, heads, device, side: PageStore(self.pool, fields[side], table)

    def _empty_layer(self, layer: int, table: list[int]) -> CacheLayer:
        """Return a layer of a sequence that has the pages of `table`."""
        return CacheLayer(
            self.specs[layer],
            self._maker(layer, table),
            self.pool.codecs[layer],
            self.geometry.latent,
            self.compute,
        )

    def _sequence(self, seq: int) -> PagedSequence:
        named = isinstance(seq, int) and not isinstance(seq, bool)
        found = self._sequences.get(seq) if named else None
        if found is None:
            known = named and 0 <= seq < self._next
            reason = "was freed" if known else "was never allocated"
            raise SequenceError(f"sequence {seq!r} {reason}")
        return found

    def _add(self, sequence: PagedSequence) -> int:
        seq, self._next = self._next, self._next + 1
        self._sequences[seq] = sequence
        return seq

    def allocate(self, token_ids: Sequence[int] | None = None) -> int:
        """Begin a sequence; return its id (ids are never used again).

        Parameters
        ----------
        token_ids : sequence of int, optional
            The tokens that it is going to hold. The full pages of the longest prefix that was
            published are shared: `seq_len` then says how many tokens are there already. At least
            the last token is left to be computed.
        """
        with self.pool.lock:
            table: list[int] = []
            layers = [self._empty_layer(i, table) for i in range(len(self.specs))]
            sequence = PagedSequence(table, layers)
            if token_ids is not None:
                keys = page_keys(token_ids[: max(len(token_ids) - 1, 0)], self.pool.page_size)
                self._share(sequence, self._prefixes.match(keys))
            return self._add(sequence)

    def _share(self, sequence: PagedSequence, pages: list[SharedPage]) -> None:
        if not pages:
            return
        for shared in pages:
            self.pool.retain(shared.page)
            sequence.table.append(shared.page)
        tokens = len(pages) * self.pool.page_size
        for layer, sinks in zip(sequence.layers, pages[-1].sinks, strict=True):
            layer.adopt(tokens, self.geometry, self._dtype, self.device, sinks)

    def publish(self, seq: int, token_ids: Sequence[int]) -> int:
        """Let later sequences share this one's full pages; return how many are offered.

        Parameters
        ----------
        seq : int
            A sequence.
        token_ids : sequence of int
            Its tokens from the first on; at least as many as the full pages hold are looked at.

        Raises
        ------
        GeometryError
            Fewer tokens are held than ids given.
        """
        with self.pool.lock:
            sequence = self._sequence(seq)
            if len(token_ids) > sequence.length:
                raise GeometryError(
                    f"{len(token_ids)} token ids, but sequence {seq} holds {sequence.length} tokens"
                )
            if any(layer.padding_bytes for layer in sequence.layers):
                raise GeometryError(
                    f"sequence {seq} has padding; sequences with padding don't share"
                )
            full = sequence.packed // self.pool.page_size
            sinks = [
                (layer.k.sinks if layer.k else None, layer.v.sinks if layer.v else None)
                for layer in sequence.layers
            ]
            keys = page_keys(token_ids, self.pool.page_size)[:full]
            for key, page in zip(keys, sequence.table, strict=False):
                self._prefixes.add(key, SharedPage(page, sinks))
            return len(keys)

    def fork(self, seq: int) -> int:
        """Return a new sequence with the same tokens; pages are shared until one side writes."""
        with self.pool.lock:
            source = self._sequence(seq)
            table = list(source.table)
            for page in table:
                self.pool.retain(page)
            layers = [layer.fork(self._maker(i, table)) for i, layer in enumerate(source.layers)]
            sequence = PagedSequence(table, layers)
            sequence.unclean = source.unclean
            return self._add(sequence)

    def truncate(self, seq: int, length: int) -> None:
        """Forget the tokens of a sequence from `length` on; see `ContiguousCache.truncate`."""
        if isinstance(length, bool) or not isinstance(length, int) or length < 0:
            raise GeometryError(f"truncate to a number of tokens from 0 on, not {length!r}")
        with self.pool.lock:
            sequence = self._sequence(seq)
            first_changed = length // self.pool.page_size
            for page in sequence.table[first_changed:]:
                if self.pool.references[page] == 1:
                    self._prefixes.drop(page)
            for layer in sequence.layers:
                layer.truncate(length)
            self._trim(sequence, -(-sequence.length // self.pool.page_size))
            self._clean(sequence)

    def _clean(self, sequence: PagedSequence) -> None:
        """Zero what a sequence's own pages hold of tokens that went; shared ones wait."""
        size = self.pool.page_size
        sequence.unclean = False
        for index in range(sequence.packed // size, len(sequence.table)):
            if self.pool.references[sequence.table[index]] > 1:
                sequence.unclean = True
            else:
                self._prefixes.drop(sequence.table[index])
                self._clear(sequence, index)

    def _clear(self, sequence: PagedSequence, index: int) -> None:
        for layer in sequence.layers:
            for stream in layer.streams():
                if stream.packed < (index + 1) * self.pool.page_size:
                    stream.clear_segment(index)

    def _trim(self, sequence: PagedSequence, pages: int) -> None:
        while len(sequence.table) > pages:
            self._release(sequence.table.pop())

    def _release(self, page: int) -> None:
        if self.pool.release(page):
            self._prefixes.drop(page)

    def free(self, seq: int) -> None:
        """End a sequence and give its pages back."""
        with self.pool.lock:
            sequence = self._sequence(seq)
            del self._sequences[seq]
            self._trim(sequence, 0)
            for layer in sequence.layers:
                layer.reset()

    def layer_of(self, seq: int, layer: int) -> CacheLayer:
        """Return what a sequence holds in a layer: its streams, to be read under its `lock`."""
        check_layer(layer, len(self.specs))
        return self._sequence(seq).layers[layer]

    def seq_len(self, seq: int, layer: int = 0) -> int:
        """Tokens that a sequence holds in a layer."""
        return self.layer_of(seq, layer).length

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
        counts = [tokens] * len(seqs) if isinstance(tokens, int) else list(tokens)
        if len(counts) != len(seqs):
            raise GeometryError(f"{len(counts)} numbers of tokens for {len(seqs)} sequences")
        if any(count < 0 for count in counts):
            raise GeometryError("reserve takes a number of tokens from 0 on for each sequence")
        if len(set(seqs)) != len(seqs):
            raise SequenceError("a sequence is named twice in one call")
        with self.pool.lock:
            wanted = [
                self._needs(self._sequence(seq), count, layer)
                for seq, count in zip(seqs, counts, strict=True)
            ]
            total = sum(len(copies) + new for copies, new in wanted)
            pages = self.pool.take(total, f"{sum(counts)} tokens for {len(seqs)} sequences")
            for seq, (copies, new) in zip(seqs, wanted, strict=True):
                sequence = self._sequence(seq)
                for index in copies:
                    self._replace(sequence, index, pages.pop(0))
                sequence.table += [pages.pop(0) for _ in range(new)]
                if sequence.unclean:
                    self._clean(sequence)

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
        copies = [i for i in range(first, len(table)) if self.pool.references[table[i]] > 1]
        return copies if tokens else [], new

    def _replace(self, sequence: PagedSequence, index: int, page: int) -> None:
        old = sequence.table[index]
        self.pool.copy(old, page)
        sequence.table[index] = page
        self._release(old)
        self._clear(sequence, index)
        for layer in sequence.layers:
            layer._version += 1  # unread results would read a page that is no longer this one's

    def append(self, layer: int, tokens: Mapping[int, tuple[Tensor, Tensor]]) -> None:
        """Store new tokens of many sequences in one layer: all of them, or none.

        Parameters
        ----------
        layer : int
            Layer index.
        tokens : mapping
            Sequence id -> K and V, `[H_kv, new, D]` and `[H_kv, new, D_v]`, any number each.

        Raises
        ------
        KVPactError
            Wrong input or a full pool; no sequence changed.
        """
        given = {
            seq: (k[None] if isinstance(k, Tensor) else k, v[None] if isinstance(v, Tensor) else v)
            for seq, (k, v) in tokens.items()
        }
        with self.step(layer, given) as plans:
            for entry, plan in plans:
                entry.commit(plan)

    def step(
        self,
        layer: int,
        tokens: Mapping[int, tuple[Tensor, Tensor]],
        configs: Mapping[int, AttendConfig] | None = None,
        checked: bool = False,
    ) -> PagedStep:
        """Return a context with a prepared plan per sequence; pages go back if it fails.

        `checked` says that the tokens went through `check`, be it as rows of one tensor.
        """
        check_layer(layer, len(self.specs))
        return PagedStep(self, layer, tokens, configs or {}, checked)

    def check(self, layer: int, k: Tensor, v: Tensor, q: Tensor | None = None) -> None:
        """Raise a named error unless new tokens (`[B, H_kv, new, D]`) can be stored in a layer."""
        check_layer(layer, len(self.specs))
        rows = k.shape[0] if isinstance(k, Tensor) and k.dim() == 4 else 0
        held = torch.empty(rows, 0, dtype=self._dtype, device=self.device)
        check_tokens(self.geometry, k, v, q, held)

    def view(self, seqs: Sequence[int] | None = None) -> PagedView:
        """Return sequences as the rows of one `CompressedKVCache` (new ones if None)."""
        from kvpact.cache.paged_view import PagedView

        return PagedView(self, seqs)

    @property
    def num_pages(self) -> int:
        """Pages of the pool."""
        return self.pool.num_pages

    @property
    def num_free_pages(self) -> int:
        """Pages that no sequence holds."""
        return self.pool.num_free

    def memory_usage(self) -> int:
        """Bytes of all tensors held: the pool, and the exact tokens of the sequences."""
        exact = [t for layers in self._all_layers() for layer in layers for t in layer.tensors()]
        exact += self._prefixes.tensors() + self._learnt()
        return sum(t.nbytes for t in self.pool.tensors()) + distinct_bytes(exact)

    def _learnt(self) -> list[Tensor]:
        return [t for pair in self.pool.codecs for codec in pair for t in codec.state().values()]

    def _all_layers(self) -> list[list[CacheLayer]]:
        return [sequence.layers for sequence in self._sequences.values()]

    def stats(self) -> dict[str, Any]:
        """Return what is held, as `ContiguousCache.stats`; pages count once, however many share."""
        total, pool = self.memory_usage(), self.pool.tensors()
        stats = paged_stats(self._all_layers(), pool, total, self.compute)
        layers = [layer for layers in self._all_layers() for layer in layers]
        tails = distinct_bytes(
            stream.tail_memory() for layer in layers for stream in layer.streams()
        )
        learnt = distinct_bytes(self._learnt())
        stats["bytes"]["side"] += learnt
        stats["bytes"]["window"] = tails
        stats["bytes"]["sinks"] = total - tails - learnt - sum(tensor.nbytes for tensor in pool)
        return stats
