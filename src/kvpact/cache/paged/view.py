"""Sequences of a paged cache seen as one `CompressedKVCache`: each is a row of the batch."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.nn.functional import pad

from kvpact.cache.batch.rows import BatchRows
from kvpact.cache.checks import check_layer, check_query, state_of
from kvpact.cache.layer.held import LayerPlan
from kvpact.cache.layer.stored import Step, attend_steps
from kvpact.cache.modes import detached
from kvpact.cache.paged.sequences import PagedSequences
from kvpact.cache.paged.step import make_runners, quick_rows
from kvpact.cache.stats import Summary
from kvpact.contract import AttendConfig, DequantResult, KVTile, attend_config
from kvpact.errors import GeometryError, SequenceError
from kvpact.kernels import check_queries
from kvpact.snapshot import Identity, Snapshot
from kvpact.snapshot.state import CacheState

T = TypeVar("T")


class PagedView(BatchRows):
    """A `CompressedKVCache` over sequences of unlike lengths.

    Parameters
    ----------
    cache : PagedKVCache
        Holds the sequences.
    seqs : sequence of int, optional
        Their ids. If omitted, as many sequences as the first batch has rows are allocated then,
        and freed by `reset`.

    Notes
    -----
    Where something has one axis for all rows (`AttendConfig.mask`, `DequantResult`), rows end
    together: a shorter row stands at the right, with nothing on its left.
    """

    layout = "paged"

    def __init__(self, cache: PagedSequences, seqs: Sequence[int] | None = None) -> None:
        self.cache, self.geometry = cache, cache.geometry
        self._owns = seqs is None
        self.seqs: list[int] | None = None if seqs is None else list(seqs)
        # Layers of a model may bring their first tokens in threads: one of them makes the rows for
        # all, and a failure takes them away only if no other call is about to fill them.
        self._lock = threading.Lock()
        self._calls: set[object] = set()
        self._unfilled = False
        for seq in self.seqs or ():
            cache.seq_len(seq)
        if len(set(self.seqs or ())) != len(self.seqs or ()):
            raise SequenceError("a sequence is named twice in one view; fork it")

    @property
    def batch_size(self) -> int | None:
        """Rows; None while there are none."""
        return None if self.seqs is None else len(self.seqs)

    def _take_rows(self, batch: int) -> list[int]:
        """Return the rows, made now if there are none; the view's lock is held."""
        if self.seqs is None:
            self.seqs = self.cache.allocate_rows(batch)
            self._unfilled = True
        if len(self.seqs) != batch:
            raise GeometryError(f"batch {batch}, but the view has {len(self.seqs)} sequences")
        return self.seqs

    def _with_rows(self, batch: int, action: Callable[[list[int]], T]) -> T:
        """Run `action` on the rows; unmake those made for it if nothing comes to be stored."""
        call, stored = object(), False
        try:
            with self._lock:
                self._calls.add(call)
                rows = self._take_rows(batch)
            result = action(rows)
            stored = True
            return result
        finally:
            with self._lock:
                self._calls.discard(call)
                self._unfilled = self._unfilled and not stored
                if self._unfilled and not self._calls:
                    self._unfilled = False
                    self.reset()

    def _configs(self, layer: int, new: int, config: AttendConfig) -> dict[int, AttendConfig]:
        """Return each row's part of the config."""
        assert self.seqs is not None
        if config.mask is config.padding is config.origin is None:
            return dict.fromkeys(self.seqs, config)
        longest = self.seq_len(layer) + new
        configs = {}
        for row, seq in enumerate(self.seqs):
            mask, padding, origin = config.mask, config.padding, config.origin
            if mask is not None:
                total = self.cache.seq_len(seq, layer) + new
                if mask.dim() != 4 or mask.shape[-1] != longest:
                    raise GeometryError(
                        f"mask has shape {tuple(mask.shape)}; its last axis should be {longest}, "
                        "the longest row's tokens held and new"
                    )
                if mask.shape[0] not in (1, len(self.seqs)):
                    raise GeometryError(f"mask has {mask.shape[0]} rows, not {len(self.seqs)}")
                mask = mask[row : row + 1] if mask.shape[0] > 1 else mask
                mask = mask[..., longest - total :]
            for name, rows in (("padding", padding), ("origin", origin)):
                if rows is not None and rows.shape != (len(self.seqs),):
                    raise GeometryError(f"{name} should have shape [{len(self.seqs)}]")
            padding, origin = (x if x is None else x[row : row + 1] for x in (padding, origin))
            configs[seq] = replace(config, mask=mask, padding=padding, origin=origin)
        return configs

    @detached
    def _store(
        self, layer: int, k: Tensor, v: Tensor, q: Tensor | None, config: AttendConfig, run: bool
    ) -> tuple[list[Step], list[AttendConfig], Tensor | None]:
        good = self.cache.check(layer, k, v, q)
        if q is not None:
            check_query(self.cache.geometry, q, config)
        query = q if run else None
        return self._with_rows(
            k.shape[0], lambda seqs: self._store_rows(layer, seqs, k, v, query, config, good)
        )

    def _store_rows(
        self,
        layer: int,
        seqs: list[int],
        k: Tensor,
        v: Tensor,
        q: Tensor | None,
        config: AttendConfig,
        good: Sequence[Tensor | None],
    ) -> tuple[list[Step], list[AttendConfig], Tensor | None]:
        configs = self._configs(layer, k.shape[2], config)
        pairs = zip(torch.split(k, 1), torch.split(v, 1), strict=True)
        tokens = dict(zip(seqs, pairs, strict=True))
        rules = [configs[seq] for seq in seqs]
        output: list[Tensor] = []

        def before(plans: list[LayerPlan]) -> None:
            assert q is not None
            if config.exact_new:
                output.append(attend_steps([plan.step for plan in plans], q, rules))
                return
            for plan, row, rule in zip(plans, torch.split(q, 1), rules, strict=True):
                assert plan.after.k is not None
                check_queries(row, k.shape[1], plan.after.k.length, rule)

        with self.cache.layer_locks[layer]:
            if q is not None and config.padding is config.mask is config.origin is None:
                make_runners(self.cache, layer, seqs, k, v, q, config)
                found = quick_rows(self.cache, layer, seqs, k, v, q, config)
                if found is not None:
                    return [], rules, found
            call = None if q is None else before
            steps = self.cache.step(layer, tokens, configs, good, call)
            if q is not None and not config.exact_new:
                output.append(attend_steps(steps, q, rules))
        return steps, rules, output[0] if output else None

    def attend(
        self, layer: int, *, k: Tensor, v: Tensor, q: Tensor, config: AttendConfig | None = None
    ) -> Tensor:
        """Store new tokens of all rows and attend; see `ContiguousCache.attend`."""
        if torch.is_inference_mode_enabled():
            return self._detached_attend(layer, k=k, v=v, q=q, config=config)
        config, seqs = attend_config(config), self.seqs
        known = type(layer) is int and 0 <= layer < len(self.cache.specs)
        if seqs and known and not self._unfilled:
            output = quick_rows(self.cache, layer, seqs, k, v, q, config)
            if output is not None:
                return output
        _, _, output = self._store(layer, k, v, q, config, run=True)
        assert output is not None
        return output

    _detached_attend = detached(attend)

    def prefill(
        self,
        layer: int,
        k: Tensor,
        v: Tensor,
        q: Tensor | None = None,
        config: AttendConfig | None = None,
    ) -> DequantResult:
        """Store new tokens; return K and V of all, decompressed when read.

        Rows of unlike length are padded with zeros on the left.
        """
        config = attend_config(config)
        steps, configs, _ = self._store(layer, k, v, q, config, run=False)
        results = [
            step.dequantize(None if q is None else q[i : i + 1], rules)
            for i, (step, rules) in enumerate(zip(steps, configs, strict=True))
        ]
        total = max(result.total for result in results)

        def tiles() -> Iterator[KVTile]:
            bias = None
            if any(result.logit_bias is not None for result in results):
                assert q is not None
                none = q.new_zeros(1, *q.shape[1:3], 0, dtype=torch.float32)
                parts = [none if x.logit_bias is None else x.logit_bias for x in results]
                bias = torch.cat([pad(x, (total - x.shape[3], 0)) for x in parts])
            ends = [(0, 0, total - result.total, 0) for result in results]
            keys = [pad(result.k, end) for result, end in zip(results, ends, strict=True)]
            values = [pad(result.v, end) for result, end in zip(results, ends, strict=True)]
            yield KVTile(0, total, torch.cat(keys), torch.cat(values), bias)

        return DequantResult(tiles, total, any(result.has_bias for result in results))

    def verify(self) -> None:
        """Raise `NonFiniteError` if a check that ``check="deferred"`` put off has failed."""
        for seq in self.seqs or ():
            self.cache.verify(seq)

    def seq_len(self, layer: int = 0) -> int:
        """Tokens of the longest row in a layer."""
        return max((self.cache.seq_len(seq, layer) for seq in self.seqs or ()), default=0)

    def truncate(self, length: int) -> None:
        """Cut every row to at most `length` tokens."""
        for seq in self.seqs or ():
            self.cache.truncate(seq, length)

    def reset(self, layer: int | None = None) -> None:
        """Forget all tokens: free the view's own sequences, or empty those it was given.

        Raises
        ------
        GeometryError
            A layer is named: a page holds all layers of its tokens, which are reset together.
        """
        if layer is not None:
            check_layer(layer, self.cache.geometry.num_layers)
            raise GeometryError("a page holds all layers; reset all of them, without naming one")
        if self._owns:
            for seq in self.seqs or ():
                self.cache.free(seq)
            self.seqs = None
        else:
            self.truncate(0)

    def snapshot(
        self,
        *,
        token_ids: Tensor | None = None,
        identity: Identity | None = None,
        page_size: int | None = None,
    ) -> Snapshot:
        """Return what the rows hold; they have to be of equal length (`PagedKVCache.snapshot`)."""
        return self.cache.snapshot(
            self.seqs or [], token_ids=token_ids, identity=identity, page_size=page_size
        )

    def restore(self, snapshot: Snapshot) -> None:
        """Hold what a snapshot holds, a sequence per row; see `PagedKVCache.restore`.

        A view of sequences that it was given keeps their ids and takes as many rows as it has.
        """
        self.restore_state(state_of(snapshot))

    def restore_state(self, held: CacheState) -> None:
        """Restore a state; see `restore`."""
        rows = list(range(held.batch))
        if self._owns:
            old, self.seqs = self.seqs, self.cache.restore_state(held, rows) or None
            for seq in old or ():
                self.cache.free(seq)
        elif len(rows) != len(self.seqs or ()):
            raise GeometryError(
                f"the snapshot has {len(rows)} rows, the view {len(self.seqs or ())} sequences"
            )
        else:
            self.cache.restore_state(held, rows, self.seqs)

    def fork(self) -> PagedView:
        """Return a view of forked sequences."""
        other = PagedView(self.cache)
        if self.seqs is not None:
            other.seqs = self.cache.fork_rows(self.seqs)
        return other

    def _keep_rows(self, indices: Tensor) -> None:
        """Fork rows that repeat, free those that are not kept."""
        old = self.seqs or []
        self.seqs = self.cache.fork_rows([old[row] for row in indices.tolist()], move=True)
        for seq in old:
            if seq not in self.seqs:
                self.cache.free(seq)

    def memory_usage(self) -> int:
        """Bytes of the whole paged cache: its pool is one allocation."""
        return self.cache.memory_usage()

    def _summary(self) -> Summary:
        return self.cache._summary()

    def stats(self) -> dict[str, Any]:
        """Return what the paged cache holds."""
        return self.cache.stats()
