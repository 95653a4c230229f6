"""One attention layer over vLLM's pages: sequences of a batch attend, their tokens are stored."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from kvpact.cache.pages import PageSource
from kvpact.cache.segments import clear_segment
from kvpact.contract import AttendConfig
from kvpact.integrations.vllm.page import PageForm
from kvpact.kernels import (
    AttendCall,
    LayerView,
    Plan,
    Segment,
    StepRow,
    StepRunner,
    StepTokens,
    StreamView,
    TokenMemory,
)


class Row(NamedTuple):
    """A sequence's part of a batch.

    Parameters
    ----------
    start, end : int
        Its tokens in the batch.
    held : int
        Tokens of the sequence before these.
    pages : tuple of int
        The sequence's pages, in order: as many as the tokens need, the new ones included.
    """

    start: int
    end: int
    held: int
    pages: tuple[int, ...]


class PagedLayer:
    """K and V of one layer in the pages that vLLM allocated; not for two threads at once.

    Parameters
    ----------
    form : PageForm
        What the pages hold.
    plan : Plan
        Who computes.
    pages : Tensor
        `[P, H, N, C]` uint8, see `PageForm.fields`.

    Raises
    ------
    GeometryError
        The pages are laid out otherwise.
    """

    def __init__(self, form: PageForm, plan: Plan, pages: Tensor) -> None:
        self.pages, self._plan, self._tokens = pages, plan, form.tokens
        self._sides = tuple(zip((plan.k, plan.v), form.fields(pages), strict=True))
        # Of the sequences of the last batch, by their pages.
        self._sources: dict[tuple[int, ...], tuple[PageSource, PageSource]] = {}
        self._runners: dict[tuple[int, ...], StepRunner] = {}
        self._no_tail = TokenMemory(torch.empty(1, 1, 0, 1), 0)
        # Tokens written to each page since it was cleared. vLLM gives pages to other sequences as
        # they are, and slots are written by OR. -1: not known.
        self._filled = np.full(len(pages), -1, dtype=np.int64)

    def step(
        self,
        rows: Sequence[Row],
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        config: AttendConfig,
    ) -> None:
        """Attend, then store the new tokens.

        A new token is attended as it was given, by itself and the tokens of the same call; earlier
        ones as they are stored.

        Parameters
        ----------
        rows : sequence of Row
            The sequences: prompts, chunks of prompts and single tokens in any order.
        q : Tensor
            `[tokens, H_q, D]`.
        k, v : Tensor
            `[tokens, H_kv, D]` and `[tokens, H_kv, D_v]`.
        out : Tensor
            `[tokens, H_q, D_v]`, overwritten.
        config : AttendConfig
            Scale and softcap.

        Raises
        ------
        NonFiniteError
            A token that the method can't hold; it is not stored.
        """
        single = [row for row in rows if row.held and row.end - row.start == 1]
        several = [row for row in rows if not row.held or row.end - row.start > 1]
        self._sources = {
            row.pages: self._sources.get(row.pages) or self._make_sources(row.pages) for row in rows
        }
        if single and not self._decode(single, q, k, v, out, config):
            several = list(rows)
        self._attend(several, q, k, v, out, config)
        self._store(several, (k, v))

    def _decode(
        self,
        rows: list[Row],
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        config: AttendConfig,
    ) -> bool:
        """Carry out `step` for single new tokens in one native call.

        Returns
        -------
        bool
            False where there is no such call, or a token may be beyond the method's range: then
            nothing is stored.
        """
        tokens = [row.start for row in rows]
        q, k, v = (x[tokens].unsqueeze(2) for x in (q, k, v))
        made, before = [], self._runners
        self._runners = {}
        for i, row in enumerate(rows):
            runner = before.get(row.pages)
            if runner is None or not runner.fits_rows(k, v, q, config, len(rows)):
                k1, v1, q1 = (x[i : i + 1] for x in (k, v, q))
                call = AttendCall(self._view(row, k1, v1), k1, v1, q1, config)
                runner = self._plan.step(call)
            if runner is None:
                return False
            self._runners[row.pages] = runner
            nothing = StepTokens(row.held, self._no_tail, False, row.held, 1, False)
            made.append(StepRow(runner, row.held, nothing, nothing))
            self._clear(row)
        output = made[0].runner.run(made, k, v, q)
        if output is None:
            return False
        out[tokens] = output.squeeze(2)
        return True

    def _view(self, row: Row, k: Tensor, v: Tensor) -> LayerView:
        sources = self._sources[row.pages]
        k_view, v_view = (
            StreamView(side.codec, source, row.held, x[:, :, :0], None, None, 0, _always)
            for (side, _), source, x in zip(self._sides, sources, (k, v), strict=True)
        )
        return LayerView(k_view, v_view, None)

    def _attend(
        self,
        rows: Sequence[Row],
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        config: AttendConfig,
    ) -> None:
        alike = defaultdict(list)
        for row in rows:
            k1, v1, q1 = (_sequence(x, row.start, row.end) for x in (k, v, q))
            view = self._view(row, k1, v1) if row.held else None
            alike[row.end - row.start].append((row, AttendCall(view, k1, v1, q1, config)))
        # Calls whose queries are equally many are one call of the kernels.
        for group in alike.values():
            output = self._plan.attend([call for _, call in group])
            for (row, _), one in zip(group, output, strict=True):
                out[row.start : row.end] = one.transpose(0, 1)

    def _make_sources(self, pages: tuple[int, ...]) -> tuple[PageSource, PageSource]:
        k, v = (PageSource(fields, pages, self._tokens) for _, fields in self._sides)
        return k, v

    def _store(self, rows: Sequence[Row], tokens: tuple[Tensor, Tensor]) -> None:
        ready = [
            (row, side.prepare(_sequence(x, row.start, row.end)), fields)
            for row in rows
            for (side, fields), x in zip(self._sides, tokens, strict=True)
        ]
        for row in rows:
            self._clear(row)
        for row, (encoder, prepared), fields in ready:
            first, inside = divmod(row.held, self._tokens)
            segments = [_page(fields, page) for page in row.pages[first:]]
            encoder.write(prepared, segments, self._tokens, inside)

    def _clear(self, row: Row) -> None:
        """Clear what a row's pages hold behind the place where its new tokens go."""
        start, end = row.held, row.held + row.end - row.start
        while start < end:
            index, inside = divmod(start, self._tokens)
            page, after = row.pages[index], min((index + 1) * self._tokens, end)
            if inside == 0 and self._filled[page]:
                self.pages[page].zero_()
            elif self._filled[page] != inside:
                for side, fields in self._sides:
                    clear_segment(side.codec, _page(fields, page), inside)
            self._filled[page] = inside + after - start
            start = after


def _sequence(x: Tensor, start: int, end: int) -> Tensor:
    """Return tokens `[T, H, D]` as one row, `[1, H, end - start, D]`."""
    return x[start:end].transpose(0, 1).unsqueeze(0)


def _page(fields: Segment, page: int) -> Segment:
    return {name: tensor[page : page + 1] for name, tensor in fields.items()}


def _always() -> None:
    """Pass: pages stay where they are as long as vLLM runs."""
