"""Pages with tokens that could not be stored: their readers get NaN, as from any damaged cache.

vLLM's own cache stores NaN and infinity, and what was computed from them is NaN for all who read
them, of the prefix cache too. kvpact's methods can't hold them (nor numbers beyond fp16), and vLLM
has no way to fail one request from its attention.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import cache
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nan

from kvpact.errors import GeometryError, NonFiniteError
from kvpact.integrations.pages.window import Row
from kvpact.kernels import Encoder, StreamPlan, check_arrival
from kvpact.quantizers.checks import collected, deferred, require_finite


class Damage:
    """The damaged pages of one layer."""

    def __init__(self, page_tokens: int) -> None:
        self._page_tokens = page_tokens
        self._pages: set[int] = set()

    def among(self, pages: Iterable[int]) -> bool:
        """Return whether one of these pages is damaged."""
        return bool(self._pages) and not self._pages.isdisjoint(pages)

    def whole(self, rows: list[Row], out: Tensor) -> list[Row]:
        """Return the rows that read no damaged page; the others get NaN, and damage their pages."""
        if not self._pages:
            return rows
        whole = []
        for row in rows:
            held = -(-row.held // self._page_tokens)
            if self.among(row.pages[:held]):
                self.cut(row, 0, out)
            else:
                self.mend(row.pages[held:])
                whole.append(row)
        return whole

    def cut(self, row: Row, count: int, out: Tensor) -> None:
        """Cut a row after `count` new tokens: the others' outputs are NaN, their pages damaged."""
        out[row.start + count : row.end] = nan
        self.mark(row, count)

    def mark(self, row: Row, count: int = 0) -> None:
        """Mark the pages as damaged that a row wrote to after `count` new tokens."""
        self._pages.update(row.pages[(row.held + count) // self._page_tokens :])

    def copied(self, sources: Iterable[int], targets: Iterable[int]) -> None:
        """Note that pages were copied over others."""
        for source, target in zip(sources, targets, strict=True):
            (self._pages.add if source in self._pages else self._pages.discard)(target)

    def mend(self, pages: Iterable[int]) -> None:
        """Mark these pages as whole, because they are written to from their beginnings."""
        self._pages.difference_update(pages)


def storable(prepare: Callable[[int], object], count: int) -> int:
    """Return how many of the first tokens of a call `prepare` accepts, fewer than all."""
    good, bad = 0, count
    while bad - good > 1:
        middle = (good + bad) // 2
        try:
            prepare(middle)
            good = middle
        except NonFiniteError:
            bad = middle
    return good


def prepared(side: StreamPlan, x: Tensor, good: Tensor | None) -> tuple[Encoder, Any]:
    """Do all that can refuse tokens; deferred checks write to `good`."""
    if side.codec.group > 1:
        check_arrival(side, x, 0, None)
        return side.encoder, None
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


class Watch:
    """Flags of all layers for the batch that runs, by the page of a row's end; all read at once."""

    def __init__(self, device: str) -> None:
        self.rows: Sequence[Row] = ()
        self._good = torch.ones(0, dtype=torch.bool, device=device)
        self._layers: WeakSet[Damage] = WeakSet()

    def flags(self, pages: int) -> Tensor:
        """Return the flags, `[pages]` bool, True where all could be stored; one for all layers."""
        if not len(self._good):
            self._good = self._good.new_ones(pages)
        if len(self._good) != pages:
            raise GeometryError(
                f"layers with {len(self._good)} and {pages} pages; kvpact's plug-in needs as many "
                "in all layers on a GPU"
            )
        return self._good

    def add(self, damage: Damage) -> None:
        """Register a layer's damage, which `read` marks from here on."""
        self._layers.add(damage)

    def read(self) -> list[Row]:
        """Return the last batch's rows that could not be stored, with their pages marked."""
        if bool(self._good.all()):
            return []
        bad = set(torch.nonzero(~self._good).flatten().tolist())
        self._good.fill_(True)
        cut = [row for row in self.rows if row.pages[-1] in bad]
        for damage in self._layers:
            for row in cut:
                damage.mark(row)
        return cut


@cache
def watch_of(kind: str) -> Watch | None:
    """Return this process's watch for a type of device; None on a CPU: checks are immediate."""
    return None if kind == "cpu" else Watch(kind)
