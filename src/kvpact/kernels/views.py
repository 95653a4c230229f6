"""Views of one layer for attention: packed slots read in tiles, and exact tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from kvpact.kernels.offset import KnownByPosition, RowOffset
from kvpact.kernels.sources import SegmentSource
from kvpact.methods import Codec

CHUNK = 256
"""Tokens that are decoded at a time."""


WAITING = -1
"""Instead of a number of exact tokens: they wait."""


def exact_from(before: int, packed: int, out: int) -> int:
    """Return where a stream's tail begins after an append, as device kernels count it.

    `before`: where it began; `packed`: tokens with slots then; `out`: tokens that have left the
    window.
    """
    return max(before, min(packed, out))


class StreamView(NamedTuple):
    """K or V of one layer at one moment.

    - `exact_from`: tokens from here on are in `tail`; those before are packed.
    - `sinks`, `sink_positions`: `[B, H, S, D]`, `[B, S]`, each row's first tokens, all before
      `sink_end`.
    - `check`: raises `StaleResult` if the view's slots are no longer there.
    - `offset`: what was taken off packed tokens, or their rotation; exact ones are whole.
    - `window`: exact tokens that a step leaves at the end; `WAITING` where new ones stay exact.
    """

    codec: Codec
    source: SegmentSource
    exact_from: int
    tail: Tensor
    sinks: Tensor | None
    sink_positions: Tensor | None
    sink_end: int
    check: Callable[[], None]
    offset: KnownByPosition | None = None
    window: int = 0

    @property
    def length(self) -> int:
        """Tokens in all."""
        return self.exact_from + self.tail.shape[2]

    def exact(self, start: int, end: int) -> Tensor:
        """Return tokens of the tail; contiguous, since a product's last bits depend on strides."""
        return self.tail[:, :, start - self.exact_from : end - self.exact_from].contiguous()

    def place_sinks(self, y: Tensor, start: int, make: Callable[[Tensor], Tensor]) -> Tensor:
        """Return decoded tokens from `start` on, overwritten with sinks as `make` makes them."""
        if self.sinks is None or self.sink_positions is None or start >= self.sink_end:
            return y
        whole, y = y, y[:, :, : self.sink_end - start]
        count = y.shape[2]
        place = self.sink_positions - start
        # No host read: tokens that stand elsewhere are written to one place too many, and cut off.
        place = torch.where((place >= 0) & (place < count), place, count)
        index = place[:, None, :, None].expand(-1, y.shape[1], -1, y.shape[3])
        longer = torch.cat([y, y[:, :, :1]], 2)
        y.copy_(longer.scatter_(2, index, make(self.sinks).to(y.dtype))[:, :, :count])
        return whole

    def offset_logits(self, rows: Tensor, start: int, end: int) -> Tensor | None:
        """Return what packed tokens' logits lack, `[B, H, R, t]`, zero for sinks; None: nothing."""
        if not isinstance(self.offset, RowOffset):
            return None
        logits = self.offset.logits(rows, start, end)
        if self.sink_positions is not None and start < self.sink_end:
            tokens = torch.arange(start, end, dtype=torch.int64, device=rows.device).view(1, -1, 1)
            sinks = (tokens == self.sink_positions.unsqueeze(1)).any(-1)
            logits = logits.masked_fill_(sinks[:, None, None, :], 0)
        return logits


class LayerView(NamedTuple):
    """K and V of one layer, `length` tokens each, at one moment; `padding`: `[B]`, on the left."""

    k: StreamView
    v: StreamView
    padding: Tensor | None

    @property
    def length(self) -> int:
        """Tokens in all."""
        return self.k.length

    def chunks(self) -> Iterator[tuple[int, int]]:
        """Iterate over token ranges in each of which K is all packed or all exact, and so is V."""
        size = self.k.source.segment_tokens
        step = max(CHUNK // size, 1) * size
        cuts = sorted({0, self.k.exact_from, self.v.exact_from, self.length})
        for low, high in pairwise(cuts):
            start = low
            while start < high:
                end = min((start // step + 1) * step, high)
                yield start, end
                start = end
