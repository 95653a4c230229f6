"""Prompts without a past over an engine's pages, each in one call of a backend.

The other ways of `PagedLayer` define what comes out and what is stored, and decide where it can't.
"""

from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from kvpact.cache.paged.pool import PageSource
from kvpact.contract import AttendConfig
from kvpact.integrations.pages.window import Row, Window
from kvpact.kernels import (
    AttendCall,
    LayerView,
    Plan,
    Segment,
    StepRunner,
    StepTokens,
    StreamView,
    Table,
    Where,
)

ROOM = 64
"""Pages that prompts have at most, until one has more."""


class Batch(NamedTuple):
    """Tokens of a batch, `[tokens, heads, D]` each, their outputs, and how they attend."""

    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor
    config: AttendConfig

    def of(self, row: Row) -> tuple[Tensor, Tensor, Tensor]:
        """Return the queries, keys and values of a row, `[1, heads, new, D]` each."""
        q, k, v = (x[row.start : row.end].transpose(0, 1).unsqueeze(0) for x in self[:3])
        return q, k, v


class _AnyPages(PageSource):
    """The pages whose addresses stand in a `table`, from a `row` on, at the time of a call."""

    def __init__(self, fields: Segment, page_size: int, table: Table, row: int) -> None:
        super().__init__(fields, (), page_size)
        for i, (name, x) in enumerate(fields.items()):
            self._where[name] = Where(table, row + i, 0, x.stride(1) * x.itemsize)


class FirstTokens:
    """One layer's prompts, by a runner that stays whatever their pages and lengths are."""

    def __init__(
        self, plan: Plan, fields: tuple[Segment, Segment], page_tokens: int, latent: bool
    ) -> None:
        self._plan, self._fields, self._latent = plan, fields, latent
        self._page_tokens, self._group = page_tokens, plan.k.codec.group
        tensors = [x for side in fields for x in side.values()]
        self._bases = np.array([[x.data_ptr()] for x in tensors], dtype=np.int64)
        self._page = tensors[0].stride(0) * tensors[0].itemsize  # all are parts of the same pages
        self._table = np.zeros((len(tensors), 0), dtype=np.int64)
        self._like: tuple[Any, ...] = ()
        self._runner: StepRunner | None = None

    def take(self, row: Row, window: Window, width: int, batch: Batch) -> bool:
        """Attend and store a row's tokens; its slots are zero, and its `window` is as after it.

        False: nothing was done, it can't.
        """
        runner, count = self._runner, len(row.pages)
        like = tuple((x.shape[1:], x.stride(), x.dtype) for x in batch[:3])
        same = like == self._like and count <= self._table.shape[1]
        if not same or not (runner is None or runner.takes(batch.config)):
            runner, self._like = self._make(row, window, width, batch), like
        if runner is None:
            return False
        np.add(self._bases, _numbers(row.pages) * self._page, out=self._table[:, :count])
        (k, v), keep = window.memories, width > 0
        k_new = StepTokens(0, k, keep, 0, window.packed, False)
        v_new = StepTokens(0, v, keep, 0, row.length, False)
        return runner.first(slice(row.start, row.end), k_new, v_new, batch[:3], batch.out)

    def _make(self, row: Row, window: Window, width: int, batch: Batch) -> StepRunner | None:
        room = max(2 * len(row.pages), ROOM)
        self._table = table = np.zeros((len(self._bases), room), dtype=np.int64)
        views, at = [], 0
        for side, fields, memory in zip(
            (self._plan.k, self._plan.v), self._fields, window.memories, strict=True
        ):
            source, tail = _AnyPages(fields, self._page_tokens, table, at), memory.tokens(0, 0)
            at += len(fields)
            rest = None, None, 0, lambda: None, None, width
            views.append(StreamView(side.codec, source, 0, tail, *rest))
        q, k, v = batch.of(row)
        call = AttendCall(LayerView(*views, None), k, v, q, batch.config, latent=self._latent)
        self._runner = self._plan.step(call)
        return self._runner


@lru_cache(maxsize=64)  # the layers of a model have the same pages
def _numbers(pages: tuple[int, ...]) -> Table:
    return np.array(pages, dtype=np.int64)
