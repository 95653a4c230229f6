"""The table of rows that attention kernels read (see `columns`), made on the host."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from kvpact.errors import CorruptState
from kvpact.kernels.base import AttendCall
from kvpact.kernels.torch.logits import mask_numbers
from kvpact.kernels.triton import columns as at
from kvpact.kernels.triton.forms import SlotForm, Slots, places_of
from kvpact.kernels.views import StreamView
from kvpact.snapshot.pages import sent

UNBOUNDED = 1 << 30  # more tokens than any row holds: the window where there is none


class Rows(NamedTuple):
    """The table, and what has to live until the kernels have run."""

    table: Tensor  # `[B, COLUMNS]` int64 on the device
    exact: list[Tensor]  # the exact tokens that it points to
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

    def column(self, part: slice, place: int, numbers: Tensor | int | None) -> None:
        """Set a column to numbers `[rows]` of either device, or to one."""
        if numbers is None:
            return
        if isinstance(numbers, int) or numbers.device.type == "cpu":
            self.table[part, place] = numbers
        else:
            self.late.append((part, place, numbers))

    def source(self, part: slice, place: int, tokens: Tensor | None) -> None:
        """Set a source of exact tokens `[B, H, T, D]`."""
        if tokens is None or not tokens.numel():
            return
        if tokens.stride(3) != 1 and tokens.shape[3] != 1:
            tokens = tokens.contiguous()
        self.exact.append(tokens)
        self.address(part, place, tokens)
        self.table[part, place + 1] = tokens.stride(1) * tokens.itemsize
        self.table[part, place + 2] = tokens.stride(2) * tokens.itemsize

    def address(self, part: slice, place: int, x: Tensor) -> None:
        """Set where each row of `[B, …]` lies."""
        steps = np.arange(x.shape[0]) * (x.stride(0) * x.itemsize)
        self.table[part, place] = x.data_ptr() + steps

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
    """Return the table of rows of calls of one launch.

    `dtypes`: in which exact tokens of K and of V are read. `first`: where the first row of each
    call stands in the output. `skipped`: tokens that another kernel attends (`fast_range`).
    """
    filling = _Filling(sum(call.q.shape[0] for call in calls), device)
    done = 0
    for call, output, skip in zip(calls, first, skipped, strict=True):
        part = slice(done, done + call.q.shape[0])
        done = part.stop
        _counts(filling, part, call, output)
        _rules(filling, part, call)
        filling.column(part, at.SKIP_FROM.value, skip[0])
        filling.table[part, at.SKIP_TO.value] = skip[1]
        k, v = (None, None) if call.view is None else (call.view.k, call.view.v)
        sides = (at.K_SIDE, call.k, k), (at.V_SIDE, call.v, v)
        for (side, fresh, stream), dtype, known in zip(sides, dtypes, slots, strict=True):
            filling.source(part, side.new, None if fresh is None else fresh.to(dtype))
            if stream is not None and known is not None and known.form is not None:
                _stream(filling, part, side, stream, dtype, known.form)
    return filling.done()


def _counts(filling: _Filling, part: slice, call: AttendCall, output: int) -> None:
    table, view, held, new = filling.table, call.view, call.held, call.new
    table[part, at.HELD.value], table[part, at.NEW.value] = held, new
    table[part, at.FIRST_QUERY.value] = held + new - call.q.shape[2]
    table[part, at.OUTPUT.value] = np.arange(output, output + call.q.shape[0])
    filling.column(part, at.PADDING.value, call.padding)
    if view is None:
        return
    if view.v.length != held:
        raise CorruptState(f"K holds {held} tokens and V {view.v.length}; reset this layer")
    filling.column(part, at.SINKS_FROM.value, view.padding)


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
        mask = mask_numbers(sent(config.mask, filling.device)).expand(batch, heads, queries, -1)
        filling.alive.append(mask)
        filling.address(part, at.MASK.value, mask)
        for axis in (1, 2, 3):
            table[part, at.MASK.value + axis] = mask.stride(axis) * mask.itemsize


def _stream(
    filling: _Filling,
    part: slice,
    side: at.SideColumns,
    stream: StreamView,
    dtype: torch.dtype,
    form: SlotForm,
) -> None:
    batch, table = part.stop - part.start, filling.table
    table[part, side.exact_from] = stream.exact_from
    table[part, side.sinks] = 0 if stream.sinks is None else stream.sinks.shape[2]
    filling.source(part, side.tail, stream.tail.to(dtype))
    filling.source(part, side.sink, None if stream.sinks is None else stream.sinks.to(dtype))
    places = places_of(stream.source, form, batch, filling.device)
    filling.alive += [places.table, places.heads]
    numbers = (places.table.data_ptr(), places.heads.data_ptr(), np.arange(batch), batch)
    for index, number in enumerate((*numbers, places.table.shape[2], places.segment_tokens)):
        table[part, side.slots + index] = number
