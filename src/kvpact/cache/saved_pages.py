"""Sequences of a paged cache as plain state and back."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from kvpact.cache.layer import CacheLayer
from kvpact.cache.modes import detached
from kvpact.cache.saved import build_snapshot, check_fits, layer_state, restored_layer
from kvpact.cache.sequence_pages import SequencePages, alone
from kvpact.cache.sequences import PagedSequence
from kvpact.errors import GeometryError, SequenceError
from kvpact.snapshot import Identity, LayerState, Snapshot
from kvpact.snapshot.parts import select_rows, stack_rows


class PagedSnapshots(SequencePages):
    """What a `PagedKVCache` does with snapshots."""

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
        return build_snapshot(
            states, self.specs, self.geometry, self.layout, token_ids, identity, page_size
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
        return self.restore_rows(snapshot, [row], None if seq is None else [seq])[0]

    @alone
    def restore_rows(
        self, snapshot: Snapshot, rows: Sequence[int], seqs: Sequence[int] | None = None
    ) -> list[int]:
        """Make a sequence of each of these rows, all or none; see `restore`."""
        check_fits(snapshot, self.specs, self.geometry, self._dtype)
        if seqs is not None and (len(seqs) != len(rows) or len(set(seqs)) != len(seqs)):
            raise SequenceError(f"{len(rows)} rows go into as many different sequences, not {seqs}")
        old = [self._sequence(seq) for seq in seqs or ()]
        built = self._restored(snapshot, rows)
        if seqs is None:
            return self._add(built)
        self._retired.extend(old)
        self._sequences.update(zip(seqs, built, strict=True))
        for sequence in old:
            self._trim(sequence, 0)
            sequence.end()
        return list(seqs)

    def _restored(self, snapshot: Snapshot, rows: Sequence[int]) -> list[PagedSequence]:
        """Return new sequences, each on pages of its own; pages go back if one can't be made."""
        batch, size = snapshot.manifest.batch, self.pool.page_size
        for row in rows:
            if type(row) is not int or not 0 <= row < max(batch, 1):
                raise GeometryError(f"row {row!r} is not one of 0 … {max(batch, 1) - 1}")
        per_row = -(-snapshot.tokens // size)
        pages = self.pool.take(per_row * len(rows), f"{snapshot.tokens} tokens, {len(rows)} times")
        tables = [pages[i * per_row : (i + 1) * per_row] for i in range(len(rows))]
        layers: list[list[CacheLayer]] = [[] for _ in rows]
        try:
            for index in range(len(self.specs)):
                state = snapshot.layer(index)
                for row, table, made in zip(rows, tables, layers, strict=True):
                    empty = self._empty_layer(index, table)
                    one = select_rows(state, [row]) if state.streams is not None else state
                    made.append(restored_layer(empty, one, self.device, shared=True))
        except BaseException:
            for page in pages:
                self.pool.release(page)
            raise
        return [PagedSequence(*parts) for parts in zip(tables, layers, strict=True)]
