"""Sequences of a paged cache: begun, shared, written to, cut, freed, saved and counted."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from kvpact.cache.checks import check_fits, check_layer, check_tokens, state_of
from kvpact.cache.layer.held import LayerPlan, exchange
from kvpact.cache.layer.layer import CacheLayer
from kvpact.cache.layer.states import layer_state, page_tokens, restored_layer
from kvpact.cache.layer.stored import Step
from kvpact.cache.modes import detached
from kvpact.cache.paged.locks import SequencePages, alone
from kvpact.cache.paged.sequence import PagedSequence, distinct_bytes, hold_packed
from kvpact.cache.paged.sharing import SharedPage, page_keys, seal
from kvpact.cache.paged.step import store_rows
from kvpact.cache.stats import Summarized, Summary, paged_stats
from kvpact.contract import AttendConfig, check_dense
from kvpact.errors import GeometryError, SequenceError
from kvpact.geometry import CacheGeometry, check_count
from kvpact.quantizers.checks import by_row
from kvpact.snapshot import Identity, LayerState, Snapshot
from kvpact.snapshot.parts import select_rows, stack_rows
from kvpact.snapshot.state import CacheState


class PagedSequences(Summarized, SequencePages):
    """The sequences of a `PagedKVCache`."""

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
        sequence, pages = PagedSequence(table, layers), self._prefixes.match(keys)
        for shared in pages:
            self.pool.retain(shared.page)
            table.append(shared.page)
        tokens = len(pages) * self.pool.page_size
        like = torch.empty(0, dtype=self._dtype, device=self.device)
        for layer, sinks in zip(layers, pages[-1].sinks, strict=True) if pages else ():
            hold_packed(layer, tokens, self.geometry, like, sinks)
        return sequence

    @alone
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
        sequence = self._sequence(seq)
        if len(token_ids) > sequence.length:
            raise GeometryError(
                f"{len(token_ids)} token ids, but sequence {seq} holds {sequence.length} tokens"
            )
        if any(layer.padding is not None for layer in sequence.layers):
            raise GeometryError(f"sequence {seq} has padding; sequences with padding don't share")
        size, sinks = self.pool.page_size, []
        for layer in sequence.layers:
            seal(layer, min(len(token_ids), layer.length) // size * size)
            k, v = layer.k, layer.v
            sinks.append((k and k.first_tokens(None), v and v.first_tokens(None)))
        keys = page_keys(token_ids, size)[: sequence.packed // size]
        for key, page in zip(keys, sequence.table, strict=False):
            self._prefixes.add(key, SharedPage(page, sinks))
        return len(keys)

    @alone
    def fork(self, seq: int) -> int:
        """Return a new sequence with the same tokens; pages are shared until one side writes."""
        return self._add([self._fork(seq)])[0]

    @alone
    def fork_rows(self, seqs: Sequence[int], move: bool = False) -> list[int]:
        """Return a fork of each, all or none; with `move` each one itself where it comes first."""
        kept = [move and seq not in seqs[:i] for i, seq in enumerate(seqs)]
        made = [self._fork(s) for s, keep in zip(seqs, kept, strict=True) if not keep]
        ids = iter(self._add(made))
        return [s if keep else next(ids) for s, keep in zip(seqs, kept, strict=True)]

    def _fork(self, seq: int) -> PagedSequence:
        source = self._sequence(seq)
        table = list(source.table)
        layers = [layer.fork(self._maker(i, table)) for i, layer in enumerate(source.layers)]
        for page in table:
            self.pool.retain(page)
        return PagedSequence(table, layers)

    @alone
    def truncate(self, seq: int, length: int) -> None:
        """Forget the tokens of a sequence from `length` on; see `ContiguousCache.truncate`."""
        check_count("length", length)
        sequence = self._sequence(seq)
        self._change(sequence, length // self.pool.page_size)
        exchange(sequence.layers, [layer.truncated(length) for layer in sequence.layers])
        self._trim(sequence, -(-sequence.length // self.pool.page_size))
        for layer in sequence.layers:
            if not layer.clean:
                layer.settle()

    @alone
    def free(self, seq: int) -> None:
        """End a sequence and give its pages back."""
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
        """Store new tokens `[1, H_kv, new, D]` by sequence; return a `Step` of each: all or none.

        `configs`: padding and `exact_new` by id; `good`: what `check` returned; `before`: called
        with the plans before anything is stored, which nothing is if it raises.
        """
        check_layer(layer, len(self.specs))
        if good is None:
            good = [self.check(layer, k, v)[0] for k, v in tokens.values()]
        return store_rows(self, layer, tokens, configs or {}, good, before)

    def verify(self, seq: int | None = None) -> None:
        """Raise `NonFiniteError` if a deferred check has failed, of one sequence or of all."""
        known = list(self._sequences.items()) if seq is None else [(seq, self._sequence(seq))]
        for number, sequence in known:
            for index, layer in enumerate(sequence.layers):
                layer.verify(f"sequence {number}, layer {index}: ")

    def check(
        self, layer: int, k: Tensor, v: Tensor, q: Tensor | None = None
    ) -> list[Tensor] | list[None]:
        """Raise a named error unless new tokens can be stored in a layer.

        Returns a 0-d bool of each row where the check of numbers is deferred, None where it was
        made.
        """
        check_layer(layer, len(self.specs))
        check_dense("k", k)
        rows = k.shape[0] if k.dim() == 4 else 0
        held = torch.empty(rows, 0, dtype=self._dtype, device=self.device)
        with self.compute.checking() as flags:
            check_tokens(self.geometry, k, v, q, held)
        return by_row(flags, rows)

    @detached
    def snapshot(
        self,
        seqs: int | Sequence[int],
        *,
        token_ids: Tensor | None = None,
        identity: Identity | None = None,
        page_size: int | None = None,
    ) -> Snapshot:
        """Return what a sequence holds, or what several of equal length hold, as rows.

        Parameters and errors as in `ContiguousCache.snapshot`.

        Raises
        ------
        GeometryError
            The sequences are of unlike length or were cut at unlike places.
        """
        states = self._states([seqs] if isinstance(seqs, int) else list(seqs))
        return Snapshot.build(
            states,
            geometry=self.geometry,
            layout=self.layout,
            page_size=page_tokens(self.specs, self.geometry, page_size),
            identity=identity,
            token_ids=token_ids,
        )

    @alone
    def _states(self, seqs: Sequence[int]) -> list[LayerState]:
        """Return the state of each layer, a row per sequence."""
        if not seqs:
            return [LayerState(spec.to_json(), None, None) for spec in self.specs]
        rows = [self._sequence(seq).layers for seq in seqs]
        return [stack_rows([layer_state(x) for x in layers]) for layers in zip(*rows, strict=True)]

    def restore(self, snapshot: Snapshot, *, row: int = 0, seq: int | None = None) -> int:
        """Make a sequence of a snapshot's row; return its id.

        Parameters
        ----------
        snapshot : Snapshot
            From a cache of any layout, read and checked as a whole before anything changes.
        row : int
            Which row.
        seq : int, optional
            A sequence to be replaced; its pages are freed when the new ones are there.

        Raises
        ------
        KVPactError
            As of `EngineCache.restore`; `MismatchError` also where codecs learnt other things.
        """
        return self.restore_state(state_of(snapshot), [row], None if seq is None else [seq])[0]

    @alone
    def restore_state(
        self, held: CacheState, rows: Sequence[int], seqs: Sequence[int] | None = None
    ) -> list[int]:
        """Make a sequence of each of these rows of a state, all or none; see `restore`."""
        check_fits(held, self.geometry)
        if seqs is not None and (len(seqs) != len(rows) or len(set(seqs)) != len(seqs)):
            raise SequenceError(f"{len(rows)} rows go into as many different sequences, not {seqs}")
        old = [self._sequence(seq) for seq in seqs or ()]
        built = self._restored(held, rows)
        if seqs is None:
            return self._add(built)
        self._retired.extend(old)
        self._sequences.update(zip(seqs, built, strict=True))
        for sequence in old:
            self._trim(sequence, 0)
            sequence.end()
        return list(seqs)

    def _restored(self, held: CacheState, rows: Sequence[int]) -> list[PagedSequence]:
        """Return new sequences, each on pages of its own; pages go back if one can't be made."""
        batch, size = held.batch, self.pool.page_size
        for row in rows:
            if type(row) is not int or not 0 <= row < max(batch, 1):
                raise GeometryError(f"row {row!r} is not one of 0 ... {max(batch, 1) - 1}")
        per_row = -(-held.tokens // size)
        pages = self.pool.take(per_row * len(rows), f"{held.tokens} tokens, {len(rows)} times")
        tables = [pages[i * per_row : (i + 1) * per_row] for i in range(len(rows))]
        layers: list[list[CacheLayer]] = [[] for _ in rows]
        try:
            for index, state in enumerate(held.layers):
                for row, table, made in zip(rows, tables, layers, strict=True):
                    empty = self._empty_layer(index, table)
                    one = select_rows(state, [row]) if state.streams is not None else state
                    made.append(restored_layer(empty, one, self.device, True, index, self._dtype))
        except BaseException:
            for page in pages:
                self.pool.release(page)
            raise
        return [PagedSequence(*parts) for parts in zip(tables, layers, strict=True)]

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
        exact = [tensor for layer in self._all_layers() for tensor in layer.tensors()]
        exact += self._prefixes.tensors() + self._learnt()
        return sum(t.nbytes for t in self.pool.tensors()) + distinct_bytes(exact)

    def _learnt(self) -> list[Tensor]:
        return [t for pair in self.pool.codecs for codec in pair for t in codec.state().values()]

    def _all_layers(self) -> list[CacheLayer]:
        return [x for sequence in list(self._sequences.values()) for x in sequence.layers]

    def _summary(self) -> Summary:
        layers, rows = self._all_layers(), len(self._sequences)
        return Summary.of(self.specs, layers, self.memory_usage(), rows)

    def stats(self) -> dict[str, Any]:
        """Return what is held, as `ContiguousCache.stats`; pages count once, however many share."""
        total, pool, layers = self.memory_usage(), self.pool.tensors(), self._all_layers()
        stats = paged_stats(layers, pool, total, self.compute)
        tails = distinct_bytes(x.tail_memory() for layer in layers for x in layer.streams())
        learnt = distinct_bytes(self._learnt())
        stats["bytes"]["side"] += learnt
        stats["bytes"]["window"] = tails
        stats["bytes"]["sinks"] = total - tails - learnt - sum(tensor.nbytes for tensor in pool)
        return stats
