"""Sequences of a paged cache seen as one `CompressedKVCache`: each is a row of the batch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from kvpact.attention import check_queries
from kvpact.attention.attend import query_groups
from kvpact.cache.paged import PagedKVCache
from kvpact.cache.step import Step
from kvpact.contract import AttendConfig, DequantResult, Fused, KVTile
from kvpact.errors import GeometryError, SequenceError

_DEFAULT = AttendConfig()


class PagedView:
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

    def __init__(self, cache: PagedKVCache, seqs: Sequence[int] | None = None) -> None:
        self.cache = cache
        self._owns = seqs is None
        self.seqs: list[int] | None = None if seqs is None else list(seqs)
        for seq in self.seqs or ():
            cache.seq_len(seq)
        if len(set(self.seqs or ())) != len(self.seqs or ()):
            raise SequenceError("a sequence is named twice in one view; fork it")

    @property
    def batch_size(self) -> int | None:
        """Rows; None while there are none."""
        return None if self.seqs is None else len(self.seqs)

    def _rows(self, batch: int) -> list[int]:
        if self.seqs is None:
            self.seqs = [self.cache.allocate() for _ in range(batch)]
        if len(self.seqs) != batch:
            raise GeometryError(f"batch {batch}, but the view has {len(self.seqs)} sequences")
        return self.seqs

    def _configs(self, layer: int, new: int, config: AttendConfig) -> dict[int, AttendConfig]:
        """Return each row's part of the config."""
        assert self.seqs is not None
        longest = self.seq_len(layer) + new
        configs = {}
        for row, seq in enumerate(self.seqs):
            mask, padding = config.mask, config.padding
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
            if padding is not None:
                if padding.shape != (len(self.seqs),):
                    raise GeometryError(f"padding should have shape [{len(self.seqs)}]")
                padding = padding[row : row + 1]
            configs[seq] = replace(config, mask=mask, padding=padding)
        return configs

    @torch.no_grad()
    def _store(
        self, layer: int, k: Tensor, v: Tensor, q: Tensor | None, config: AttendConfig, run: bool
    ) -> tuple[list[Step], list[AttendConfig], list[Tensor]]:
        fresh = self.seqs is None
        tokens, configs, outputs = {}, {}, []
        try:
            self.cache.check(layer, k, v, q)
            if q is not None:
                query_groups(q.shape[1], k.shape[1], config)
            seqs, new = self._rows(k.shape[0]), k.shape[2]
            configs = self._configs(layer, new, config)
            tokens = {seq: (k[i : i + 1], v[i : i + 1]) for i, seq in enumerate(seqs)}
            with self.cache.step(layer, tokens, configs) as plans:
                if run and q is not None:
                    for i, (seq, (entry, plan)) in enumerate(zip(seqs, plans, strict=True)):
                        row, rules = q[i : i + 1], configs[seq]
                        if config.exact_new:
                            outputs.append(plan.step.attend(row, rules))
                        else:
                            check_queries(row, k.shape[1], entry.length + new, rules)
                steps = [entry.commit(plan) for entry, plan in plans]
        except BaseException:
            if fresh:
                self.reset()
            raise
        if run and q is not None and not config.exact_new:
            outputs = [
                step.attend(q[i : i + 1], configs[seq])
                for i, (seq, step) in enumerate(zip(seqs, steps, strict=True))
            ]
        return steps, [configs[seq] for seq in seqs], outputs

    def attend(
        self, layer: int, k: Tensor, v: Tensor, q: Tensor, config: AttendConfig | None = None
    ) -> Tensor:
        """Store new tokens of all rows and attend; see `ContiguousCache.attend`."""
        _, _, outputs = self._store(layer, k, v, q, config or _DEFAULT, run=True)
        return torch.cat(outputs)

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
        config = config or _DEFAULT
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
                parts = [
                    result.logit_bias
                    if result.logit_bias is not None
                    else torch.zeros(1, *q.shape[1:3], result.total, device=q.device)
                    for result in results
                ]
                bias = torch.cat([_right(x, total, -1) for x in parts])
            keys = torch.cat([_right(result.k, total, 2) for result in results])
            values = torch.cat([_right(result.v, total, 2) for result in results])
            yield KVTile(0, total, keys, values, bias)

        return DequantResult(tiles, total, any(result.has_bias for result in results))

    def decode(
        self, layer: int, k: Tensor, v: Tensor, q: Tensor, config: AttendConfig | None = None
    ) -> Fused:
        """Store one token a row and attend over all."""
        if isinstance(k, Tensor) and k.dim() == 4 and k.shape[2] != 1:
            raise GeometryError(f"decode takes one token, not {k.shape[2]}; use attend or prefill")
        return Fused(self.attend(layer, k, v, q, config))

    def seq_len(self, layer: int = 0) -> int:
        """Tokens of the longest row in a layer."""
        return max((self.cache.seq_len(seq, layer) for seq in self.seqs or ()), default=0)

    def truncate(self, length: int) -> None:
        """Cut every row to at most `length` tokens."""
        for seq in self.seqs or ():
            self.cache.truncate(seq, length)

    def reset(self) -> None:
        """Forget all tokens: free the view's own sequences, or empty those it was given."""
        if self._owns:
            for seq in self.seqs or ():
                self.cache.free(seq)
            self.seqs = None
        else:
            self.truncate(0)

    def fork(self) -> PagedView:
        """Return a view of forked sequences."""
        other = PagedView(self.cache)
        if self.seqs is not None:
            other.seqs = [self.cache.fork(seq) for seq in self.seqs]
        return other

    def select(self, indices: Tensor) -> None:
        """Keep the rows `indices`, in this order; rows may repeat. The others are freed."""
        if not isinstance(indices, Tensor):
            raise GeometryError("indices should be a tensor")
        if indices.dim() != 1 or indices.dtype not in (torch.int32, torch.int64):
            raise GeometryError("indices should be a 1-D tensor of integers")
        if self.seqs is None:
            return
        rows = indices.tolist()
        if not rows or min(rows) < 0 or max(rows) >= len(self.seqs):
            raise GeometryError(f"indices should be one or more of 0 … {len(self.seqs) - 1}")
        old = self.seqs
        kept: set[int] = set()
        chosen = []
        for row in rows:
            seq = old[row]
            chosen.append(self.cache.fork(seq) if seq in kept else seq)
            kept.add(seq)
        for seq in old:
            if seq not in kept:
                self.cache.free(seq)
        self.seqs = chosen

    def reorder(self, indices: Tensor) -> None:
        """Rearrange the rows (beam search): `select` with as many rows as there are."""
        count = indices.numel() if isinstance(indices, Tensor) else 0
        if self.seqs is not None and count != len(self.seqs):
            raise GeometryError(f"reorder takes a tensor of {len(self.seqs)} indices, not {count}")
        self.select(indices)

    def repeat(self, repeats: int) -> None:
        """Repeat every row `repeats` times, next to each other."""
        if isinstance(repeats, bool) or not isinstance(repeats, int) or repeats < 1:
            raise GeometryError(f"repeat takes a number from 1 on, not {repeats!r}")
        if self.seqs is not None:
            self.select(torch.arange(len(self.seqs)).repeat_interleave(repeats))

    def memory_usage(self) -> int:
        """Bytes of the whole paged cache: its pool is one allocation."""
        return self.cache.memory_usage()

    def stats(self) -> dict[str, Any]:
        """Return what the paged cache holds."""
        return self.cache.stats()


def _right(x: Tensor, total: int, dim: int) -> Tensor:
    """Pad with zeros at the front of an axis."""
    missing = total - x.shape[dim]
    if not missing:
        return x
    shape = list(x.shape)
    shape[dim] = missing
    return torch.cat([x.new_zeros(shape), x], dim)
