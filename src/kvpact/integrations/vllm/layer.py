"""One attention layer over vLLM's pages: sequences of a batch attend, their tokens are stored."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor

from kvpact.cache.pages import PageSource
from kvpact.cache.segments import clear_segment
from kvpact.contract import AttendConfig
from kvpact.errors import NonFiniteError
from kvpact.integrations.vllm.damage import Damage, storable
from kvpact.integrations.vllm.page import PageForm
from kvpact.integrations.vllm.prompt import Run
from kvpact.integrations.vllm.window import Row, Window, WindowPool
from kvpact.kernels import (
    AttendCall,
    Encoder,
    LayerView,
    PlacedSegments,
    Plan,
    Segment,
    StepRow,
    StepRunner,
    StepTokens,
    StreamPlan,
    StreamView,
    all_finite,
)
from kvpact.kernels.triton.forms import sent
from kvpact.quantizers.checks import collected, deferred, require_finite


class PagedLayer:
    """K and V of one layer in the pages that vLLM allocated; not for two threads at once.

    - `pages`: `[P, H, N, C]` uint8, see `PageForm.fields`.
    - `windows`: the exact tokens of this layer.
    - `good`: given where the plan defers its checks: `[P]` bool on the device. That of the page in
      which a row's last token lies becomes False where one of its tokens can't be stored; nothing
      is cut then, until whoever reads the flags marks `damage`.
    - `latent`: K and V are MLA latents and rotated keys, of one head; queries are absorbed.
    - `damage`: the pages that hold tokens which could not be stored.
    """

    def __init__(
        self,
        form: PageForm,
        plan: Plan,
        pages: Tensor,
        windows: WindowPool,
        good: Tensor | None = None,
        latent: bool = False,
    ) -> None:
        self.pages, self._plan, self._tokens, self._windows = pages, plan, form.tokens, windows
        self._good, self._latent = good, latent
        self._sides = tuple(zip((plan.k, plan.v), form.fields(pages), strict=True))
        # Of the sequences of the last batch, by their pages.
        self._sources: dict[tuple[int, ...], tuple[PageSource, PageSource]] = {}
        self._batch: list[tuple[int, ...]] = []
        # Of the last batch of single tokens; they take the same calls.
        self._steps: list[tuple[int, ...]] = []
        self._runners: list[StepRunner] = []
        # Tokens written to each page since it was cleared. vLLM gives pages to other sequences as
        # they are, and slots are written by OR. -1: not known.
        self._filled = [-1] * len(pages)
        self.damage = Damage(form.tokens)

    def step(
        self,
        rows: Sequence[Row],
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        config: AttendConfig,
        prompts: Sequence[Run] = (),
    ) -> dict[int, NonFiniteError]:
        """Attend, then store the new tokens.

        A new token is attended as it was given, by itself and the tokens of the same call; so are
        those in the window. Others are attended as they are stored. From a token on that the method
        can't hold, nothing of its sequence is stored, and its outputs are NaN (`damage.py`).

        `rows`: the sequences: prompts, chunks of prompts and single tokens in any order. None reads
        a page that another one fills (see `waves`). `q`: `[tokens, H_q, D]`. `k`, `v`:
        `[tokens, H_kv, D]` and `[tokens, H_kv, D_v]`. `out`: `[tokens, H_q, D_v]`, overwritten.
        `prompts`: those of the rows that another kernel attends with (see `Scratch.plan`). Returns
        the sequences that were cut in this call, by the start of their rows, and why.
        """
        cut: dict[int, NonFiniteError] = {}
        rows = self.damage.whole(list(rows), out)
        batch = [row.pages for row in rows]
        if batch != self._batch:
            known, self._batch = self._sources, batch
            self._sources = {p: known.get(p) or self._make_sources(p) for p in batch}
        windows = self._windows.claim(rows)
        try:
            both = list(zip(rows, windows, strict=True))
            single: list[tuple[Row, Window]] = []
            chunks: list[tuple[Row, Window]] = []
            wide = self._windows.width > 0
            for one in both:  # a step finds a token before it, as it needs where there are windows
                row, window = one
                step = row.held > 0 and row.end - row.start == 1
                step = step and (not wide or window.end > window.first)
                (single if step else chunks).append(one)
            if single and self._decode(single, q, k, v, out, config):
                both = chunks
            others = {row.start for run in prompts for row in run.rows}
            both, ready = self._prepare(both, (q, k, v), out, cut, others)
            if cut and others:  # Who shares a run with a cut row is attended below.
                both, ready = self._prepare(both, (q, k, v), out, cut)
            by_start = {row.start: (row, window) for row, window in both}
            for run in prompts:
                if any(by_start.get(row.start, (None,))[0] != row for row in run.rows):
                    continue  # One was cut: the others are attended below.
                taken = [by_start.pop(row.start) for row in run.rows]
                views = [self._view(*one) if one[0].held else None for one in taken]
                run.attend(views, self._plan, (q, k, v), out, config)
            self._attend(list(by_start.values()), q, k, v, out, config)
            self._store(both, ready, (k, v))
        finally:
            self._windows.keep(rows, windows)
        return cut

    def loaded(self, pages: Sequence[int]) -> None:
        """Take note that somebody else filled these pages: full, and without windows."""
        for page in pages:
            self._filled[page] = self._tokens
        self._windows.forget(pages)
        self.damage.mend(pages)

    def _decode(
        self,
        rows: list[tuple[Row, Window]],
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        config: AttendConfig,
    ) -> bool:
        """Carry out `step` for single new tokens in one native call.

        False where there is no such call, or a token may be beyond the method's range: then nothing
        is stored.
        """
        tokens = _places([row.start for row, _ in rows], q.device)
        q, k, v = (x[tokens].unsqueeze(2) for x in (q, k, v))
        runners = self._runners_for(rows, q, k, v, config)
        if runners is None:
            return False
        self._windows.make_room([window for _, window in rows])
        made, width, filled = [], self._windows.width, self._filled
        for (row, window), runner in zip(rows, runners, strict=True):
            exact, (k_memory, v_memory) = max(window.first, window.end - width), window.memories
            k_new = StepTokens(exact, k_memory, width > 0, row.held, 1, False)
            v_new = StepTokens(exact, v_memory, width > 0, row.held, 1, False)
            made.append(StepRow(runner, row.held, k_new, v_new))
            index, inside = divmod(row.held, self._tokens)
            if inside and filled[row.pages[index]] == inside:
                filled[row.pages[index]] = inside + 1
            else:
                self._clear(row)
        output = made[0].runner.run(made, k, v, q)
        if output is None:
            return False
        for _, window in rows:
            window.end += 1
        out[tokens] = output.squeeze(2)
        return True

    def _runners_for(
        self,
        rows: list[tuple[Row, Window]],
        q: Tensor,
        k: Tensor,
        v: Tensor,
        config: AttendConfig,
    ) -> list[StepRunner] | None:
        """Return what carries out a step of each row, most often what did in the last batch."""
        steps, count = [row.pages for row, _ in rows], len(rows)
        if steps == self._steps and self._runners[0].fits_rows(k, v, q, config, count):
            return self._runners
        before = dict(zip(self._steps, self._runners, strict=True))
        self._steps, self._runners, runners = [], [], []
        for i, (row, window) in enumerate(rows):
            runner = before.get(row.pages)
            if runner is None or not runner.fits_rows(k, v, q, config, count):
                k1, v1, q1 = (x[i : i + 1] for x in (k, v, q))
                call = self._call(self._view(row, window), k1, v1, q1, config)
                runner = self._plan.step(call, self._flag(row))
            if runner is None:
                return None
            runners.append(runner)
        self._steps, self._runners = steps, runners
        return runners

    def _call(
        self, view: LayerView | None, k: Tensor, v: Tensor, q: Tensor, config: AttendConfig
    ) -> AttendCall:
        return AttendCall(view, k, v, q, config, latent=self._latent)

    def _view(self, row: Row, window: Window) -> LayerView:
        exact, sources = self._windows.exact_from(window), self._sources[row.pages]
        tails = (memory.tokens(exact, row.held) for memory in window.memories)
        k, v = (
            StreamView(
                side.codec, source, exact, tail, None, None, 0, _always, None, self._windows.width
            )
            for (side, _), source, tail in zip(self._sides, sources, tails, strict=True)
        )
        return LayerView(k, v, None)

    def _attend(
        self,
        rows: list[tuple[Row, Window]],
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        config: AttendConfig,
    ) -> None:
        alike = defaultdict(list)
        for row, window in rows:
            k1, v1, q1 = (_sequence(x, row.start, row.end) for x in (k, v, q))
            view = self._view(row, window) if row.held else None
            alike[row.end - row.start].append((row, self._call(view, k1, v1, q1, config)))
        # Calls whose queries are equally many are one call of the kernels.
        for group in alike.values():
            output = self._plan.attend([call for _, call in group])
            for (row, _), one in zip(group, output, strict=True):
                out[row.start : row.end] = one.transpose(0, 1)

    def _make_sources(self, pages: tuple[int, ...]) -> tuple[PageSource, PageSource]:
        k, v = (PageSource(fields, pages, self._tokens) for _, fields in self._sides)
        return k, v

    def _prepare(
        self,
        rows: list[tuple[Row, Window]],
        qkv: tuple[Tensor, Tensor, Tensor],
        out: Tensor,
        cut: dict[int, NonFiniteError],
        others: Collection[int] = (),
    ) -> tuple[list[tuple[Row, Window]], list[list[tuple[Encoder, Any]]]]:
        """Do all that can refuse tokens, before anything is attended or written.

        Queries of the rows that start at `others` may be no numbers: the engine's own kernel
        attends with them, and its outputs are NaN then.

        Returns `rows`: what of the rows can be stored; `ready`: what writes each, and what it
        writes.
        """
        kept, ready = [], []
        for row, window in rows:
            try:
                ready.append(self._prepare_row(row, qkv, row.start in others))
            except NonFiniteError as error:
                cut[row.start] = error
                whole, row = row, self._storable(row, qkv)
                self.damage.cut(whole, row.end - row.start, out)
                if row.end == row.start:
                    continue
                ready.append(self._prepare_row(row, qkv))
            kept.append((row, window))
        return kept, ready

    def _storable(self, row: Row, qkv: tuple[Tensor, Tensor, Tensor]) -> Row:
        """Return what of a row can be stored, when not all of it can: its first tokens."""
        parts = [row._replace(end=end) for end in range(row.start, row.end)]
        row = parts[storable(lambda n: self._prepare_row(parts[n], qkv), len(parts))]
        held = row.held + row.end - row.start
        row = row._replace(pages=row.pages[: -(-held // self._tokens)])
        self._sources[row.pages] = self._make_sources(row.pages)
        return row

    def _prepare_row(
        self, row: Row, qkv: tuple[Tensor, Tensor, Tensor], any_query: bool = False
    ) -> list[tuple[Encoder, Any]]:
        q, *tokens = (_sequence(x, row.start, row.end) for x in qkv)
        if self._good is None and not any_query and not all_finite(q):
            raise NonFiniteError("queries hold NaN or infinity")
        sides, good = zip(self._sides, tokens, strict=True), self._flag(row)
        return [_prepared(side, x, good) for (side, _), x in sides]

    def _flag(self, row: Row) -> Tensor | None:
        return None if self._good is None else self._good[row.pages[-1]]

    def _store(
        self,
        rows: list[tuple[Row, Window]],
        ready: list[list[tuple[Encoder, Any]]],
        tokens: tuple[Tensor, Tensor],
    ) -> None:
        for (row, window), prepared in zip(rows, ready, strict=True):
            self._clear(row)
            for (encoder, what), source in zip(prepared, self._sources[row.pages], strict=True):
                segments = PlacedSegments(source, len(source.pages))
                encoder.write(what, segments, self._tokens, row.held)
            k, v = (_sequence(x, row.start, row.end) for x in tokens)
            self._windows.append(window, (k, v))

    def _clear(self, row: Row) -> None:
        """Clear what a row's pages hold behind the place where its new tokens go."""
        start, end = row.held, row.held + row.end - row.start
        while start < end:
            index, inside = divmod(start, self._tokens)
            page, after = row.pages[index], min((index + 1) * self._tokens, end)
            if inside == 0:
                self.pages[page].zero_()
            elif self._filled[page] != inside:
                for side, fields in self._sides:
                    clear_segment(side.codec, _page(fields, page), inside)
            self._filled[page] = inside + after - start
            start = after


def _places(tokens: list[int], device: torch.device) -> slice | Tensor:
    """Return an index of tokens, which makes no copy of them where they stand side by side."""
    if tokens[-1] - tokens[0] == len(tokens) - 1:
        return slice(tokens[0], tokens[-1] + 1)
    return sent(torch.tensor(tokens, dtype=torch.int64, device="cpu"), device)


def _prepared(side: StreamPlan, x: Tensor, good: Tensor | None) -> tuple[Encoder, Any]:
    """Do all that can refuse tokens; where checks are deferred, `good` gets to know."""
    if good is None:
        return side.prepare(x)
    with deferred():
        require_finite(x, lambda: NonFiniteError("NaN or infinity"))
        side.codec.check_range(x)
        ready = side.prepare(x)
        found = collected()
    if found is not None:
        good.logical_and_(found)
    return ready


def _sequence(x: Tensor, start: int, end: int) -> Tensor:
    """Return tokens `[T, H, D]` as one row, `[1, H, end - start, D]`."""
    return x[start:end].transpose(0, 1).unsqueeze(0)


def _page(fields: Segment, page: int) -> Segment:
    return {name: tensor[page : page + 1] for name, tensor in fields.items()}


def _always() -> None:
    """Pass: pages stay where they are as long as vLLM runs."""
