"""Tokens that a GPU's kernels could not store, found at the next batch: no step waits for a check.

A flag for each page tells of the row whose last token lies there. Whoever makes the next batch
reads all flags at once, and marks in every layer the pages that such a row wrote to (`damage.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING
from weakref import WeakSet

import torch
from torch import Tensor

from kvpact.errors import GeometryError
from kvpact.integrations.vllm.window import Row

if TYPE_CHECKING:
    from kvpact.integrations.vllm.layer import PagedLayer


class Watch:
    """The flags of all layers of a process, for the `rows` of the batch that runs."""

    def __init__(self, device: str) -> None:
        self.rows: Sequence[Row] = ()
        self._good = torch.ones(0, dtype=torch.bool, device=device)
        self._layers: WeakSet[PagedLayer] = WeakSet()

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

    def add(self, layer: PagedLayer) -> None:
        """Tell a layer of damage from here on."""
        self._layers.add(layer)

    def read(self) -> list[Row]:
        """Return the last batch's rows that could not be stored, with their pages marked."""
        if bool(self._good.all()):
            return []
        bad = set(torch.nonzero(~self._good).flatten().tolist())
        self._good.fill_(True)
        cut = [row for row in self.rows if row.pages[-1] in bad]
        for layer in self._layers:
            for row in cut:
                layer.damage.mark(row)
        return cut


@cache
def watch_of(kind: str) -> Watch | None:
    """Return that of this process's device, by its kind; on a CPU checks are not deferred: None."""
    return None if kind == "cpu" else Watch(kind)
