"""A layer over an engine's pages: stores the tokens of a batch and attends over its sequences."""

from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kvpact.cache.paged.pool import PageSource
from kvpact.cache.stream.segments import clear_segment
from kvpact.contract import AttendConfig
from kvpact.errors import NonFiniteError
from kvpact.integrations.pages.damage import Damage, prepared, storable
from kvpact.integrations.pages.named import NamedPages, renamed
from kvpact.integrations.pages.page import PageForm
from kvpact.integrations.pages.prompt import PromptRun
from kvpact.integrations.pages.window import Row, Window, WindowPool
from kvpact.kernels import (
    AttendCall,
    Encoder,
    LayerView,
    Plan,
    StepRow,
    StepRunner,
    StepTokens,
    StreamView,
    all_finite,
)
from kvpact.methods.trellis_learning import TrellisKeyCodec
from kvpact.snapshot.pages import sent

_Part = tuple[Row, Window]
_Pages = tuple[PageSource, PageSource]
_Writers = list[tuple[Encoder, Any]]
"""The writers of a row's K and V, with the tokens; None for keys that wait for their group."""


class _Batch(NamedTuple):
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


class PagedLayer:
    """K and V of one layer in the pages that an engine allocated; not for two threads at once.

    `good`: given where the plan defers its checks: `[P]` bool on the device, False for the page of
    a row's last token where one of its tokens can't be stored; its reader marks `damage`.
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
        self._named = good is None and pages.is_cpu  # runners serve other pages, too
        self._sides, self._fields = (plan.k, plan.v), form.fields(pages)
        # Of the sequences of the last batch, by their pages.
        self._sources: dict[tuple[int, ...], _Pages] = {}
        self._tables: list[tuple[int, ...]] = []
        # Of the last batch of single tokens; they take the same calls.
        self._steps: list[tuple[int, ...]] = []
        self._runners: list[StepRunner] = []
        self._first: StepRunner | None = None
        self._like: tuple[Any, ...] = ()  # prompts that it takes
        # Tokens written to each page since it was cleared. Engines give pages to other sequences as
        # they are, and slots are written by OR. -1: not known.
        self._filled = [-1] * len(pages)
        self.damage = Damage(form.tokens)
        # Of keys in groups, those of one that is not whole wait in the window. Where it is lost, or
        # another took it, they are packed one by one, which the same codec reads.
        self._group, self._singly = 1, plan.k
        if isinstance(plan.k.codec, TrellisKeyCodec) and plan.k.codec.group > 1:
            self._group = plan.k.codec.group
            codec = plan.k.codec.singly()
            self._singly = plan.compute.stream(codec, plan.k.device, plan.k.dtype)
            windows.lost = self._pack_lost

    def step(
        self,
        rows: Sequence[Row],
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        config: AttendConfig,
        prompts: Sequence[PromptRun] = (),
    ) -> dict[int, NonFiniteError]:
        """Attend, then store the new tokens; return which rows were cut, by their starts, and why.

        `rows`: prompts, chunks of these and single tokens, as of `waves`. `q`, `k`, `v`, `out`:
        `[tokens, heads, D]`. `prompts`: rows that another kernel attends with (`Scratch.plan`).
        """
        cut: dict[int, NonFiniteError] = {}
        rows, batch = self.damage.whole(list(rows), out), _Batch(q, k, v, out, config)
        self._take([row.pages for row in rows])
        windows = self._windows.claim(rows)
        try:
            both = list(zip(rows, windows, strict=True))
            single: list[_Part] = []
            chunks: list[_Part] = []
            wide = self._windows.width > 0
            for one in both:  # a step finds a token before it, as it needs where there are windows
                row, window = one
                step = row.held > 0 and row.end - row.start == 1
                step = step and (not wide or window.end > window.first)
                (single if step else chunks).append(one)
            others = {row.start for run in prompts for row in run.rows}
            both = chunks if single and self._decode(single, batch) else both
            both = [part for part in both if not self._begin(part, batch, others)]
            ready = self._prepare(both, batch, cut, others)
            if cut and others:  # Who shares a run with a cut row is attended below.
                ready = self._prepare([part for part, _ in ready], batch, cut)
            left = {row.start: (row, window) for (row, window), _ in ready}
            for run in prompts:
                if any(left.get(row.start, (None,))[0] != row for row in run.rows):
                    continue  # One was cut: the others are attended below.
                taken = [left.pop(row.start) for row in run.rows]
                views = [self._view(*part) if part[0].held else None for part in taken]
                run.attend(views, self._plan, (q, k, v), out, config)
            self._attend(list(left.values()), batch)
            self._store(ready, batch)
        finally:
            self._windows.keep(rows, windows)
        return cut

    def read(
        self, rows: Sequence[Row], k: Tensor, v: Tensor, count: int
    ) -> tuple[Tensor, Tensor, dict[int, NonFiniteError]]:
        """Store new tokens as `step` does; return all of the rows, decoded, and which were cut.

        `[count, heads, D]`: one row after another, then zeros.
        """
        cut: dict[int, NonFiniteError] = {}
        batch = _Batch(k, k, v, k.clone(), AttendConfig())
        whole, end = self.damage.whole(list(rows), batch.out), 0
        self._take([row.pages for row in rows])
        windows = self._windows.claim(rows)
        try:
            parts = list(zip(rows, windows, strict=True))
            ready = self._prepare([part for part in parts if part[0] in whole], batch, cut)
            k_all, v_all = (x.new_zeros(count, *x.shape[1:]) for x in (k, v))
            for row, window in parts:
                start, end = end, end + row.length
                held, new = start + row.held, slice(row.start, row.end)
                k_all[held:end], v_all[held:end] = batch.out[new], v[new]
                view: Any = self._view(row, window) if row.held else ()
                for side, stream, x in zip(self._sides, view, (k_all, v_all), strict=False):
                    packed = x[start : start + stream.exact_from]
                    if len(packed):
                        out = packed.transpose(0, 1).unsqueeze(0)
                        side.decode_slots(stream, 0, len(packed), out)
                    x[start + len(packed) : held] = stream.tail[0].transpose(0, 1)
            self._store(ready, batch)
        finally:
            self._windows.keep(rows, windows)
        return k_all, v_all, cut

    def copied(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Note that pages were copied over others."""
        for source, target in zip(sources, targets, strict=True):
            self._filled[target] = self._filled[source]
            self._windows.copied(source, target)
        self.damage.copied(sources, targets)

    def taken(self, pages: Sequence[int]) -> None:
        """Note that these pages are no longer, or not yet, a sequence's: they have no window."""
        self._windows.forget(pages)

    def loaded(self, pages: Sequence[int]) -> None:
        """Note that these pages were filled from outside: full, and without windows."""
        for page in pages:
            self._filled[page] = self._tokens
        self._windows.forget(pages)
        self.damage.mend(pages)

    def _begin(self, part: _Part, batch: _Batch, others: Collection[int]) -> bool:
        """Attend and store a prompt without a past in one call; False, not done, where it can't."""
        (row, window), runner = part, self._first
        if not self._named or row.held or row.start in others:
            return False
        like = batch.q.dtype, *(x.stride() for x in batch[:3])
        fits = runner is None or (runner.takes(batch.config) and renamed([runner], row.pages))
        if not fits or like != self._like:
            runner = self._new(part, batch.of(row), batch.config)
            self._first, self._like = runner, like
        if runner is None:
            return False
        self._clear(row)
        self._windows.begin(window, row.length - row.length % self._group, row.length)
        keep = self._windows.width > 0
        k = StepTokens(0, window.memories[0], keep, 0, window.packed, False)
        v = StepTokens(0, window.memories[1], keep, 0, row.length, False)
        if runner.first(slice(row.start, row.end), k, v, batch[:3], batch.out):
            return True
        window.first = window.packed = window.end = 0
        return False

    def _decode(self, parts: list[_Part], batch: _Batch) -> bool:
        """Step single new tokens in one native call; False, nothing stored, where it can't."""
        tokens = _places([row.start for row, _ in parts], batch.q.device)
        q, k, v = (x[tokens].unsqueeze(2) for x in batch[:3])
        runners = self._runners_for(parts, q, k, v, batch.config)
        if runners is None:
            return False
        windows = [window for _, window in parts]
        self._windows.make_room(windows)
        made, keep, filled = [], self._windows.width > 0, self._filled
        exact_from = self._windows.exact_from(windows)
        at_once = int(self._group == 1)
        for (row, window), runner, exact in zip(parts, runners, exact_from, strict=True):
            k_memory, v_memory = window.memories
            k_new = StepTokens(exact, k_memory, keep, row.held, at_once, False)
            v_new = StepTokens(exact, v_memory, keep, row.held, 1, False)
            made.append(StepRow(runner, row.held, k_new, v_new))
            index, inside = divmod(row.held, self._tokens)
            if inside and filled[row.pages[index]] == inside:
                filled[row.pages[index]] = inside + 1
            else:
                self._clear(row)
        output = made[0].runner.run(made, k, v, q)
        if output is None:
            return False
        for row, window in parts:
            window.end += 1
            self._pack(row, window)
        batch.out[tokens] = output.squeeze(2)
        return True

    def _runners_for(
        self, parts: list[_Part], q: Tensor, k: Tensor, v: Tensor, config: AttendConfig
    ) -> list[StepRunner] | None:
        """Return the runner of each row's step, most often that of the last batch."""
        steps, count = [row.pages for row, _ in parts], len(parts)
        if steps == self._steps and self._runners[0].fits(k, v, q, config, count):
            return self._runners
        before = dict(zip(self._steps, self._runners, strict=True))
        spare = [before[pages] for pages in before.keys() - set(steps)]
        self._steps, self._runners, runners = [], [], []
        for i, (row, window) in enumerate(parts):
            runner = before.get(row.pages) or renamed(spare, row.pages)
            if runner is None or not runner.fits(k, v, q, config, count):
                runner = self._new((row, window), (x[i : i + 1] for x in (q, k, v)), config)
            if runner is None:
                return None
            runners.append(runner)
        self._steps, self._runners = steps, runners
        return runners

    def _new(self, part: _Part, qkv: Iterable[Tensor], config: AttendConfig) -> StepRunner | None:
        """Return a runner of calls like this one."""
        (row, window), (q, k, v), sources = part, qkv, None
        if self._named:
            k_pages, v_pages = (NamedPages(x, row.pages, self._tokens) for x in self._fields)
            sources = k_pages, v_pages
        view = self._view(row, window, sources)
        call = AttendCall(view, k, v, q, config, latent=self._latent)
        return self._plan.step(call, self._flag(row))

    def _view(self, row: Row, window: Window, sources: _Pages | None = None) -> LayerView:
        (exact,), width = self._windows.exact_from([window]), self._windows.width
        tails = (memory.tokens(exact, row.held) for memory in window.memories)
        sides = zip(self._sides, sources or self._sources[row.pages], tails, strict=True)
        # No check of staleness: pages stay where they are as long as the engine runs.
        k, v = (
            StreamView(side.codec, source, exact, tail, None, None, 0, lambda: None, None, width)
            for side, source, tail in sides
        )
        return LayerView(k, v, None)

    def _attend(self, parts: list[_Part], batch: _Batch) -> None:
        by_length = defaultdict(list)
        for row, window in parts:
            q, k, v = batch.of(row)
            view = self._view(row, window) if row.held else None
            call = AttendCall(view, k, v, q, batch.config, latent=self._latent)
            by_length[row.end - row.start].append((row, call))
        # Calls whose queries are equally many are one call of the kernels.
        for group in by_length.values():
            output = self._plan.attend([call for _, call in group])
            for (row, _), one in zip(group, output, strict=True):
                batch.out[row.start : row.end] = one.transpose(0, 1)

    def _take(self, tables: list[tuple[int, ...]]) -> None:
        """Make ready to read and write these rows' pages."""
        if tables != self._tables:
            known, self._tables = self._sources, tables
            self._sources = {p: known.get(p) or self._make_sources(p) for p in tables}

    def _make_sources(self, pages: tuple[int, ...]) -> _Pages:
        k, v = (PageSource(fields, pages, self._tokens) for fields in self._fields)
        return k, v

    def _prepare(
        self,
        parts: list[_Part],
        batch: _Batch,
        cut: dict[int, NonFiniteError],
        others: Collection[int] = (),
    ) -> list[tuple[_Part, _Writers]]:
        """Return the parts that can be stored; queries of `others` may be no numbers."""
        ready = []
        for row, window in parts:
            try:
                writers = self._writers(row, batch, row.start in others)
            except NonFiniteError as error:
                cut[row.start] = error
                whole, row = row, self._storable(row, batch)
                self.damage.cut(whole, row.end - row.start, batch.out)
                if row.end == row.start:
                    continue
                writers = self._writers(row, batch)
            ready.append(((row, window), writers))
        return ready

    def _storable(self, row: Row, batch: _Batch) -> Row:
        """Return the first tokens of a row that can be stored, when not all of them can."""
        parts = [row._replace(end=end) for end in range(row.start, row.end)]
        row = parts[storable(lambda n: self._writers(parts[n], batch), len(parts))]
        row = row._replace(pages=row.pages[: -(-row.length // self._tokens)])
        self._sources[row.pages] = self._make_sources(row.pages)
        return row

    def _writers(self, row: Row, batch: _Batch, any_query: bool = False) -> _Writers:
        q, *tokens = batch.of(row)
        if self._good is None and not any_query and not all_finite(q):
            raise NonFiniteError("queries hold NaN or infinity")
        good = self._flag(row)
        return [prepared(side, x, good) for side, x in zip(self._sides, tokens, strict=True)]

    def _flag(self, row: Row) -> Tensor | None:
        return None if self._good is None else self._good[row.pages[-1]]

    def _store(self, ready: list[tuple[_Part, _Writers]], batch: _Batch) -> None:
        for (row, window), writers in ready:
            self._clear(row)
            for (encoder, what), source in zip(writers, self._sources[row.pages], strict=True):
                if what is not None:
                    encoder.write(what, source, row.held)
            _, k, v = batch.of(row)
            self._pack(row, window, k)
            self._windows.append(window, (k, v))

    def _pack(self, row: Row, window: Window, new: Tensor | None = None) -> None:
        """Pack keys up to the last whole group; `new`: the row's, where the window lacks them."""
        start, end = window.packed, row.length - row.length % self._group
        if start < end and self._group > 1:
            x = window.memories[0].tokens(start, end if new is None else row.held)
            x = x if new is None else torch.cat([x, new], 2)[:, :, : end - start]
            source, alone = self._sources[row.pages][0], -start % self._group
            for plan, first, last in ((self._singly, 0, alone), (self._plan.k, alone, end - start)):
                if first < last:
                    encoder, what = plan.prepare(x[:, :, first:last])
                    encoder.write(what, source, start + first)
        window.packed = max(start, end)

    def _pack_lost(self, page: int, window: Window) -> None:
        """Pack keys that wait in a window which gives way to another's, one by one."""
        if window.packed < window.end:
            x = window.memories[0].tokens(window.packed, window.end)
            encoder, what = self._singly.prepare(x)
            source = PageSource(self._fields[0], (page,), self._tokens)
            encoder.write(what, source, window.packed % self._tokens)

    def _clear(self, row: Row) -> None:
        """Clear a row's pages from the place of its new tokens on."""
        start, end = row.held, row.length
        while start < end:
            index, inside = divmod(start, self._tokens)
            page, after = row.pages[index], min((index + 1) * self._tokens, end)
            if inside == 0:
                self.pages[page].zero_()
            elif self._filled[page] != inside:
                for side, source in zip(self._sides, self._sources[row.pages], strict=True):
                    clear_segment(side.codec, source.segment(index), inside)
            self._filled[page] = inside + after - start
            start = after


def _places(tokens: list[int], device: torch.device) -> slice | Tensor:
    """Return an index of tokens, which makes no copy of them where they stand side by side."""
    if tokens[-1] - tokens[0] == len(tokens) - 1:
        return slice(tokens[0], tokens[-1] + 1)
    return sent(torch.tensor(tokens, dtype=torch.int64, device="cpu"), device)
