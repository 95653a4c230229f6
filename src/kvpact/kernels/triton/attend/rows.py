"""The table of rows that attention kernels read (see `columns`), made on the host."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
import triton.language as tl
from torch import Tensor

from kvpact.errors import CorruptState, GeometryError
from kvpact.kernels.base import AttendCall
from kvpact.kernels.triton import columns as at
from kvpact.kernels.triton.forms import Slots, places_of, sent
from kvpact.kernels.views import StreamView

UNBOUNDED = 1 << 30
"""More tokens than any row holds: the window where there is none."""


class Rows(NamedTuple):
    """The table, and what has to live until the kernels have run.

    `table`: `[B, COLUMNS]` int64 on the device; `exact`: the exact tokens that it points to.
    """

    table: Tensor
    exact: list[Tensor]
    alive: list[Tensor]


class _Filling:
    """A table being filled on the host, and columns that only the device knows."""

    def __init__(self, rows: int, device: torch.device) -> None:
        # As in `forms.addresses_of`, torch would take ten times as long.
        self.table: np.ndarray[Any, Any] = np.zeros((rows, at.COLUMNS.value), dtype=np.int64)
        self.device = device
        self.exact: list[Tensor] = []
        self.alive: list[Tensor] = []
        self.late: list[tuple[slice, int, Tensor]] = []

    def column(self, part: slice, place: tl.constexpr, numbers: Tensor | int | None) -> None:
        """Set a column to numbers `[rows]` of either device, or to one."""
        if numbers is None:
            return
        if isinstance(numbers, int) or numbers.device.type == "cpu":
            self.table[part, place.value] = numbers
        else:
            self.late.append((part, place.value, numbers))

    def source(self, part: slice, place: tl.constexpr, tokens: Tensor | None) -> None:
        """Set a source of exact tokens `[B, H, T, D]`."""
        if tokens is None or not tokens.numel():
            return
        if tokens.stride(3) != 1 and tokens.shape[3] != 1:
            tokens = tokens.contiguous()
        self.exact.append(tokens)
        self.address(part, place, tokens)
        self.table[part, place.value + 1] = tokens.stride(1) * tokens.itemsize
        self.table[part, place.value + 2] = tokens.stride(2) * tokens.itemsize

    def address(self, part: slice, place: tl.constexpr, x: Tensor) -> None:
        """Set where each row of `[B, …]` lies."""
        steps = np.arange(x.shape[0]) * (x.stride(0) * x.itemsize)
        self.table[part, place.value] = x.data_ptr() + steps

    def done(self) -> Rows:
        """Send the table."""
        table = sent(torch.from_numpy(self.table), self.device)
        for part, place, numbers in self.late:
            table[part, place] = numbers
        return Rows(table, self.exact, self.alive)


def rows_of(
    calls: Sequence[AttendCall],
    slots: tuple[Slots | None, Slots | None],
    dtypes: tuple[torch.dtype, torch.dtype],
    device: torch.device,
    first: Sequence[int],
    skipped: Sequence[tuple[int | Tensor, int]],
) -> Rows:
    """Return the table of rows of calls.

    `calls`: alike in all but lengths, padding, masks, windows, causality and sink logits. `slots`:
    of K and of V; None where the calls have no view. `dtypes`: in which exact tokens of K and of V
    are read. `first`: where the first row of each call stands in the output. `skipped`: tokens of
    each call that another kernel attends (`fast_range`). Raises `CorruptState` where K and V hold
    unlike numbers of tokens: memory that is not the cache's would be read.
    """
    filling = _Filling(sum(call.q.shape[0] for call in calls), device)
    done = 0
    for call, output, skip in zip(calls, first, skipped, strict=True):
        part = slice(done, done + call.q.shape[0])
        done = part.stop
        _counts(filling, part, call, output)
        _rules(filling, part, call)
        filling.column(part, at.SKIP_FROM, skip[0])
        filling.table[part, at.SKIP_TO.value] = skip[1]
        for side, place in (("k", at.K_SLOTS), ("v", at.V_SLOTS)):
            index = "kv".index(side)
            _tokens(filling, part, call, side, dtypes[index])
            if call.view is not None:
                stream = getattr(call.view, side)
                _slots(filling, part, place, stream, slots[index])
    return filling.done()


def _counts(filling: _Filling, part: slice, call: AttendCall, output: int) -> None:
    table, view, held, new = filling.table, call.view, call.held, call.new
    table[part, at.HELD.value], table[part, at.NEW.value] = held, new
    table[part, at.FIRST_QUERY.value] = held + new - call.q.shape[2]
    table[part, at.OUTPUT.value] = np.arange(output, output + call.q.shape[0])
    filling.column(part, at.PADDING, call.padding)
    if view is None:
        return
    if view.v.length != held:
        raise CorruptState(f"K holds {held} tokens and V {view.v.length}; reset this layer")
    table[part, at.K_EXACT_FROM.value] = view.k.exact_from
    table[part, at.V_EXACT_FROM.value] = view.v.exact_from
    filling.column(part, at.SINKS_FROM, view.padding)
    for stream, place in ((view.k, at.K_SINKS), (view.v, at.V_SINKS)):
        table[part, place.value] = 0 if stream.sinks is None else stream.sinks.shape[2]


def _rules(filling: _Filling, part: slice, call: AttendCall) -> None:
    table, config = filling.table, call.config
    table[part, at.WINDOW.value] = min(config.sliding_window or UNBOUNDED, UNBOUNDED)
    table[part, at.CAUSAL.value] = config.is_causal
    if config.sink_logits is not None:
        logits = sent(config.sink_logits.detach().float().contiguous(), filling.device)
        filling.alive.append(logits)
        table[part, at.SINK_LOGITS.value] = logits.data_ptr()
    if config.mask is not None:
        batch, heads, queries, _ = call.q.shape
        mask = _mask(config.mask, filling.device).expand(batch, heads, queries, -1)
        filling.alive.append(mask)
        filling.address(part, at.MASK, mask)
        for axis in (1, 2, 3):
            table[part, at.MASK.value + axis] = mask.stride(axis) * mask.itemsize


def _mask(mask: Tensor, device: torch.device) -> Tensor:
    """Return bytes, or fp32 with -inf for what its dtype's lowest number hides."""
    mask = sent(mask, device)
    if mask.dtype == torch.bool:
        return mask.view(torch.uint8)
    hidden = mask <= torch.finfo(mask.dtype).min / 2
    return mask.to(torch.float32).masked_fill(hidden, -torch.inf)


def _tokens(
    filling: _Filling, part: slice, call: AttendCall, side: str, dtype: torch.dtype
) -> None:
    if side == "k":
        tail, sinks, new = at.K_TAIL, at.K_SINK, at.K_NEW
    else:
        tail, sinks, new = at.V_TAIL, at.V_SINK, at.V_NEW
    fresh: Tensor | None = getattr(call, side)
    filling.source(part, new, None if fresh is None else fresh.to(dtype))
    if call.view is not None:
        stream: StreamView = getattr(call.view, side)
        filling.source(part, tail, stream.tail.to(dtype))
        filling.source(part, sinks, None if stream.sinks is None else stream.sinks.to(dtype))


def _slots(
    filling: _Filling, part: slice, place: tl.constexpr, stream: StreamView, slots: Slots | None
) -> None:
    batch = part.stop - part.start
    if slots is None:
        return
    places = places_of(stream.source, slots, batch, filling.device)
    if places is None:
        raise GeometryError("the slots have gaps in memory; backend='torch' reads them")
    filling.alive += [places.table, places.heads]
    filling.table[part, place.value] = places.table.data_ptr()
    filling.table[part, place.value + 1] = places.heads.data_ptr()
    filling.table[part, place.value + 2] = np.arange(batch)
    filling.table[part, place.value + 3] = batch
    filling.table[part, place.value + 4] = places.table.shape[2]
    filling.table[part, place.value + 5] = places.segment_tokens
