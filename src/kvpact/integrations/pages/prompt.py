"""Attention of prompts by a kernel that reads exact tokens, over scratch pages.

What it computes is defined by `Plan.attend`; scores and sums are rounded as the kernel does, and
decoded numbers to the tokens' dtype.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kvpact.contract import AttendConfig
from kvpact.integrations.pages.window import Row
from kvpact.kernels import LayerView, Plan

FEW = 32
"""So many new tokens of a sequence, or fewer, are attended over its packed slots: to decode all
that came before them takes longer."""

PAGE = 128  # tokens of a scratch page

_PIECE = 1024  # tokens that are decoded at a time

Pages = tuple[Tensor, Tensor]
"""Of K and V: `[pages, H, PAGE, D]`, in the order of numbers that the kernel likes."""


class Sequences(NamedTuple):
    """Sequences that one call of a kernel attends over, all int32."""

    starts: Tensor  # `[n + 1]`, where new tokens begin in the call, and end
    lengths: Tensor  # `[n]`, new ones included
    tables: Tensor  # `[n, most]` pages


class Scratch:
    """Pages of exact tokens, `tokens` at least, for one call at a time, which `kernel` attends."""

    def __init__(self, kernel: Any, heads: int, dim: int, dtype: torch.dtype, tokens: int) -> None:
        self.kernel, self._count = kernel, -(-tokens // PAGE)
        # Memory that no sequence has used yet is not taken from the system.
        whole = torch.empty(self._count, heads, 2 * PAGE, dim, dtype=dtype, device="cpu")
        self.pages: Pages = (whole[:, :, :PAGE], whole[:, :, PAGE:])
        self._piece = torch.empty(2, _PIECE, heads, dim, dtype=dtype, device="cpu")
        self._slots = torch.arange(self._count * PAGE, dtype=torch.int64, device="cpu")
        # Once the longest sequence has come.
        self.nbytes = whole.nbytes + self._piece.nbytes + self._slots.nbytes

    def plan(self, rows: Sequence[Row]) -> list[PromptRun]:
        """Return the calls for rows with more than `FEW` new tokens, side by side."""
        runs: list[list[Row]] = []
        pages = 0
        for row in rows:
            if row.end - row.start <= FEW:
                continue
            needed = _pages_of(row)
            after = bool(runs) and runs[-1][-1].end == row.start
            if not after or pages + needed > self._count:
                runs.append([])
                pages = 0
            runs[-1].append(row)
            pages += needed
        return [self._run(run) for run in runs]

    def put_held(self, view: LayerView, places: Tensor, plan: Plan) -> None:
        """Write a sequence's held tokens into pages: slots decoded, and its window."""
        exact = view.k.exact_from
        for start in range(0, exact, _PIECE):
            end = min(start + _PIECE, exact)
            k, v = self._piece[:, : end - start]
            for side, stream, piece in ((plan.k, view.k, k), (plan.v, view.v, v)):
                side.decode_slots(stream, start, end, piece.transpose(0, 1).unsqueeze(0))
            self.kernel.put(k, v, self.pages, places[start:end])
        if view.k.tail.shape[2]:
            k, v = (stream.tail[0].transpose(0, 1) for stream in (view.k, view.v))
            self.kernel.put(k, v, self.pages, places[exact : exact + len(k)])

    def _run(self, rows: list[Row]) -> PromptRun:
        counts = [_pages_of(row) for row in rows]
        firsts = [sum(counts[:i]) for i in range(len(counts))]
        tables = torch.tensor(firsts, dtype=torch.int64, device="cpu").unsqueeze(1)
        tables = tables + self._slots[: max(counts)]
        start = rows[0].start
        sequences = Sequences(
            torch.tensor([0, *(x.end - start for x in rows)], dtype=torch.int32, device="cpu"),
            torch.tensor([row.length for row in rows], dtype=torch.int32, device="cpu"),
            tables.clamp_(max=self._count - 1).to(torch.int32),
        )
        places = [
            self._slots[PAGE * first : PAGE * first + row.length]
            for row, first in zip(rows, firsts, strict=True)
        ]
        return PromptRun(rows, self, sequences, places, self.kernel.schedule(sequences))


class PromptRun(NamedTuple):
    """Rows of a batch, side by side, that one call of the kernel takes: the same in all layers."""

    rows: list[Row]
    scratch: Scratch
    sequences: Sequences
    places: list[Tensor]  # of each row's tokens in the scratch pages, the new ones last
    schedule: Any

    @property
    def start(self) -> int:
        """First token in the batch."""
        return self.rows[0].start

    @property
    def end(self) -> int:
        """Last token in the batch, and one."""
        return self.rows[-1].end

    def attend(
        self,
        views: Sequence[LayerView | None],
        plan: Plan,
        qkv: tuple[Tensor, Tensor, Tensor],
        out: Tensor,
        config: AttendConfig,
    ) -> None:
        """Attend with the new tokens in one layer; `views`: what each row holds before them."""
        q, k, v = (x[self.start : self.end] for x in qkv)
        pages, put = self.scratch.pages, self.scratch.kernel.put
        for view, places in zip(views, self.places, strict=True):
            last = int(places[-1]) // PAGE
            for side in pages:
                # The kernel multiplies what it masks by zero: that has to be a number.
                side[last].zero_()
            if view is not None:
                self.scratch.put_held(view, places, plan)
        new = [places[row.held :] for row, places in zip(self.rows, self.places, strict=True)]
        put(k, v, pages, new[0] if len(new) == 1 else torch.cat(new))
        self.scratch.kernel.attend(
            q, pages, self.sequences, self.schedule, config, out[self.start : self.end]
        )


def _pages_of(row: Row) -> int:
    return -(-row.length // PAGE)
