"""The paged cache: many sequences of unlike length on one pool of pages with packed slots."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, SupportsIndex

import torch
from torch import Tensor

from kvpact.cache.block_tables import BlockTables
from kvpact.cache.checks import check_layer, check_tokens
from kvpact.cache.codecs import Calibration
from kvpact.cache.held import LayerPlan, exchange, hold_packed
from kvpact.cache.layer import CacheLayer
from kvpact.cache.modes import detached
from kvpact.cache.offsets import KeyOffsets, check_offsets
from kvpact.cache.paged_step import store_rows
from kvpact.cache.pages import PagePool
from kvpact.cache.prefixes import SharedPage, page_keys
from kvpact.cache.room import seal
from kvpact.cache.saved_pages import PagedSnapshots
from kvpact.cache.sequences import PagedSequence, distinct_bytes
from kvpact.cache.sinks import first_tokens
from kvpact.cache.specs import cache_specs
from kvpact.cache.stats import paged_stats
from kvpact.cache.step import Step
from kvpact.contract import AttendConfig, check_dense
from kvpact.errors import GeometryError, SequenceError, SnapshotError
from kvpact.geometry import CacheGeometry, check_count
from kvpact.kernels import check_covered, choose
from kvpact.quantizers.checks import by_row
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
    calibration : Calibration, Snapshot or mapping, optional
        What methods that learn from tokens learnt, once, for all sequences: a model's calibration
        (``kvpact calibrate``), layer -> K and V, `[B, H_kv, T, D]`, to learn from, or the states of
        codecs that learnt before. Such methods can't be paged without. A `Snapshot` gives what the
        cache that it is from had learnt.
    backend, precision, check : str
        Who computes, and how (see `create_cache`).
    key_offsets : mapping, optional
        Layer -> `KeyOffset` (see `create_cache`).

    Notes
    -----
    A sequence's sinks and window are exact copies of its own, beside the pages. Calls for different
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
        precision: str = "full",
        check: str = "now",
        key_offsets: KeyOffsets | None = None,
    ) -> None:
        compute = choose(backend, precision, check)
        specs, place = cache_specs(spec, geometry), torch.device(device)
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

    @property
    def token_geometry(self) -> CacheGeometry:
        """The geometry with the dtype that tokens have to be of."""
        return replace(self.geometry, dtype=self._dtype)

    @detached
    def allocate(self, token_ids: Sequence[int] | None = None) -> int:
        """Begin a sequence; return its id (ids are never used again).

        Parameters
        ----------
        token_ids : sequence of int, optional
            The tokens that it is going to hold. The full pages of the longest prefix that was
            published are shared: `seq_len` then says how many tokens are there already. At least
            the last token is left to be computed.
        """
        size = self.pool.page_size
        known = () if token_ids is None else token_ids
        keys = page_keys(known, size)[: max(len(known) - 1, 0) // size]
        return self._with_pages(lambda: self._add([self._empty(keys)])[0])

    @detached
    def allocate_rows(self, count: int) -> list[int]:
        """Begin sequences, all or none; return their ids."""
        check_count("count", count)
        return self._with_pages(lambda: self._add([self._empty() for _ in range(count)]))

    def _empty(self, keys: Sequence[bytes] = ()) -> PagedSequence:
        table: list[int] = []
        layers = [self._empty_layer(i, table) for i in range(len(self.specs))]
        sequence = PagedSequence(table, layers)
        self._share(sequence, self._prefixes.match(keys))
        return sequence

    def _share(self, sequence: PagedSequence, pages: list[SharedPage]) -> None:
        if not pages:
            return
        for shared in pages:
            self.pool.retain(shared.page)
            sequence.table.append(shared.page)
        tokens = len(pages) * self.pool.page_size
        like = torch.empty(0, dtype=self._dtype, device=self.device)
        for layer, sinks in zip(sequence.layers, pages[-1].sinks, strict=True):
            hold_packed(layer, tokens, self.geometry, like, sinks)

    @detached
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
        return self._alone(lambda: self._publish(seq, token_ids))

    def _publish(self, seq: int, token_ids: Sequence[int]) -> int:
        sequence = self._sequence(seq)
        if len(token_ids) > sequence.length:
            raise GeometryError(
                f"{len(token_ids)} token ids, but sequence {seq} holds {sequence.length} tokens"
            )
        if any(layer.padding_bytes for layer in sequence.layers):
            raise GeometryError(f"sequence {seq} has padding; sequences with padding don't share")
        size, sinks = self.pool.page_size, []
        for layer in sequence.layers:
            seal(layer, min(len(token_ids), layer.length) // size * size)
            k, v = layer.k, layer.v
            sinks.append((k and first_tokens(k, None), v and first_tokens(v, None)))
        keys = page_keys(token_ids, size)[: sequence.packed // size]
        for key, page in zip(keys, sequence.table, strict=False):
            self._prefixes.add(key, SharedPage(page, sinks))
        return len(keys)

    @detached
    def fork(self, seq: int) -> int:
        """Return a new sequence with the same tokens; pages are shared until one side writes."""
        return self._alone(lambda: self._add([self._fork(seq)])[0])

    @detached
    def fork_rows(self, seqs: Sequence[int], move: bool = False) -> list[int]:
        """Return a fork of each, all or none; with `move` each one itself where it comes first."""

        def make() -> list[int]:
            kept = [move and seq not in seqs[:i] for i, seq in enumerate(seqs)]
            made = [self._fork(s) for s, keep in zip(seqs, kept, strict=True) if not keep]
            ids = iter(self._add(made))
            return [s if keep else next(ids) for s, keep in zip(seqs, kept, strict=True)]

        return self._alone(make)

    def _fork(self, seq: int) -> PagedSequence:
        source = self._sequence(seq)
        table = list(source.table)
        layers = [layer.fork(self._maker(i, table)) for i, layer in enumerate(source.layers)]
        for page in table:
            self.pool.retain(page)
        return PagedSequence(table, layers)

    @detached
    def truncate(self, seq: int, length: int) -> None:
        """Forget the tokens of a sequence from `length` on; see `ContiguousCache.truncate`."""
        check_count("length", length)
        self._alone(lambda: self._truncate(self._sequence(seq), length))

    def _truncate(self, sequence: PagedSequence, length: int) -> None:
        self._change(sequence, length // self.pool.page_size)
        exchange(sequence.layers, [layer.truncated(length) for layer in sequence.layers])
        self._trim(sequence, -(-sequence.length // self.pool.page_size))
        for layer in sequence.layers:
            if not layer.clean:
                layer.settle()

    def free(self, seq: int) -> None:
        """End a sequence and give its pages back."""
        self._alone(lambda: self._free(seq))

    def _free(self, seq: int) -> None:
        sequence = self._sequence(seq)
        self._retired.append(sequence)
        self.known_rows.clear()
        del self._sequences[seq]
        self._trim(sequence, 0)
        sequence.end()

    def layer_of(self, seq: int, layer: int) -> CacheLayer:
        """Return what a sequence holds in a layer: its streams, to be read under its `lock`."""
        check_layer(layer, len(self.specs))
        return self._sequence(seq).layers[layer]

    def seq_len(self, seq: int, layer: int = 0) -> int:
        """Tokens that a sequence holds in a layer."""
        return self.layer_of(seq, layer).length

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
        for k, v in tokens.values():
            check_dense("k", k)
            check_dense("v", v)
        self.step(layer, {seq: (k[None], v[None]) for seq, (k, v) in tokens.items()})

    @detached
    def step(
        self,
        layer: int,
        tokens: Mapping[int, tuple[Tensor, Tensor]],
        configs: Mapping[int, AttendConfig] | None = None,
        good: Sequence[Tensor | None] | None = None,
        before: Callable[[list[LayerPlan]], None] | None = None,
    ) -> list[Step]:
        """Store new tokens, `[1, H_kv, new, D]`, and return a `Step` per sequence: all or none.

        Parameters
        ----------
        layer, tokens
            As in `append`.
        configs : mapping, optional
            Sequence id -> padding and `exact_new`.
        good : sequence, optional
            What `check` returned for each sequence, where the tokens went through it already.
        before : callable, optional
            Called with the plans before anything is stored; nothing is stored if it raises.
        """
        check_layer(layer, len(self.specs))
        if good is None:
            good = [self.check(layer, k, v)[0] for k, v in tokens.values()]
        return store_rows(self, layer, tokens, configs or {}, good, before)

    def verify(self, seq: int | None = None) -> None:
        """Raise `NonFiniteError` if a check that ``check="deferred"`` put off has failed.

        Parameters
        ----------
        seq : int, optional
            The sequence asked about; all if omitted. What one of them holds is told of that one
            alone.
        """
        known = list(self._sequences.items()) if seq is None else [(seq, self._sequence(seq))]
        for number, sequence in known:
            for index, layer in enumerate(sequence.layers):
                layer.verify(f"sequence {number}, layer {index}: ")

    def check(
        self, layer: int, k: Tensor, v: Tensor, q: Tensor | None = None
    ) -> list[Tensor] | list[None]:
        """Raise a named error unless new tokens (`[B, H_kv, new, D]`) can be stored in a layer.

        Returns
        -------
        list
            For each row a 0-d bool, whether its numbers can be, where that check is deferred; None
            where it was made.
        """
        check_layer(layer, len(self.specs))
        check_dense("k", k)
        rows = k.shape[0] if k.dim() == 4 else 0
        held = torch.empty(rows, 0, dtype=self._dtype, device=self.device)
        with self.compute.checking() as flags:
            check_tokens(self.geometry, k, v, q, held)
        return by_row(flags, rows)

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
        return self._with_pages(lambda: self.pool.num_free)

    def memory_usage(self) -> int:
        """Bytes of all tensors held: the pool, and the exact tokens of the sequences."""
        exact = [t for layers in self._all_layers() for layer in layers for t in layer.tensors()]
        exact += self._prefixes.tensors() + self._learnt()
        return sum(t.nbytes for t in self.pool.tensors()) + distinct_bytes(exact)

    def _learnt(self) -> list[Tensor]:
        return [t for pair in self.pool.codecs for codec in pair for t in codec.state().values()]

    def _all_layers(self) -> list[list[CacheLayer]]:
        return [sequence.layers for sequence in list(self._sequences.values())]

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
