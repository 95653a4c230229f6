"""The places of a stream's slots: segments of consecutive tokens, and their readers."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from kvpact.formats import Field
from kvpact.formats.base import Places

Segment = dict[str, Tensor]
"""Storage of consecutive tokens by field name: `[B, H, units, …]` each."""


Table = np.ndarray[Any, Any]
"""The address of each field's first row and head in each segment, `[fields, segments]` int64."""


class Where(NamedTuple):
    """The place of a field of the slots in the memory of its device.

    - `table`, `field`: of all fields, and the row of this one.
    - `row`, `head`: bytes from one batch row to the next, and from one head to the next.
    """

    table: Table
    field: int
    row: int
    head: int

    @property
    def segments(self) -> np.ndarray[Any, Any]:
        """The addresses of the segments."""
        found: np.ndarray[Any, Any] = self.table[self.field]
        return found

    @property
    def address(self) -> int:
        """The address of `segments`, for native code."""
        first: int = self.table.__array_interface__["data"][0]
        return first + self.field * self.table.strides[0]


class SegmentSource(Protocol):
    """Reads a stream's segments of slots; it never changes: other segments make another source."""

    segment_tokens: int
    prepared: dict[str, Any]
    """Addresses of these slots that backends keep, by backend."""

    def gather(self, name: str, first: int, last: int) -> Tensor:
        """Return a field's units `[B, H, units, …]` of the segments `first <= i < last`."""

    def where(self, name: str) -> Where | None:
        """Return where a field lies in memory; None where segments differ in strides or have gaps.

        What is returned is valid while the source lives.
        """


class WritableSource(SegmentSource, Protocol):
    """A source whose segments can be written to, one by one."""

    def segment(self, index: int) -> Segment:
        """Return a segment."""


class ListSource:
    """Reads segments by joining them. `segments`: field -> `[B, H, units, …]` each."""

    def __init__(self, segments: tuple[Segment, ...], segment_tokens: int) -> None:
        self._segments, self.segment_tokens = segments, segment_tokens
        self._where: dict[str, Where | None] = {}
        self.prepared: dict[str, Any] = {}

    def segment(self, index: int) -> Segment:
        """Return a segment."""
        return self._segments[index]

    def gather(self, name: str, first: int, last: int) -> Tensor:
        """Return a field's units of the segments `first <= i < last`."""
        parts = [segment[name] for segment in self._segments[first:last]]
        return parts[0] if len(parts) == 1 else torch.cat(parts, 2)

    def where(self, name: str) -> Where | None:
        """Return where a field's segments lie."""
        if name not in self._where:
            tensors = [segment[name] for segment in self._segments]
            segments = np.array(list(map(Tensor.data_ptr, tensors)), dtype=np.int64)
            row, head, *_ = tensors[0].stride() if tensors else (0, 0)
            size = tensors[0].itemsize if tensors else 0
            same = all(map(Tensor.is_contiguous, tensors)) or (
                len(set(map(Tensor.stride, tensors))) == 1 and tensors[0][0, 0].is_contiguous()
            )
            self._where[name] = Where(segments[None], 0, row * size, head * size) if same else None
        return self._where[name]


class Pick:
    """The parts of a field's units that are copied: tokens or whole `units`, of a row and heads."""

    def __init__(self, field: Field, row: int, heads: slice, items: Tensor, units: bool) -> None:
        self.field, self.row, self.heads, self.items = field, row, heads, items
        size = field.dtype.itemsize * torch.Size(field.shape).numel()
        places = None if units else field.places
        self.places = places or Places((0,), 1, size, size)
        self.inside, self.unit = len(self.places.first), size

    def new(self, device: torch.device) -> Tensor:
        """Return storage for the items, `[1, heads, units, …]`, zero where no item lies."""
        heads, (units, rest) = (
            self.heads.stop - self.heads.start,
            divmod(len(self.items), self.inside),
        )
        shape = 1, heads, units + (rest > 0), *self.field.shape
        if self.inside * self.places.pieces * self.places.size < self.unit:
            return torch.zeros(shape, dtype=self.field.dtype, device=device)
        made = torch.empty(shape, dtype=self.field.dtype, device=device)
        if rest:
            made[:, :, units:] = 0
        return made


def copy_slots(source: SegmentSource, pick: Pick, out: Tensor) -> None:
    """Copy in torch."""
    places, inside = pick.places, pick.inside
    per_segment = source.segment_tokens // pick.field.tokens
    last = int(pick.items[-1]) // inside // per_segment + 1
    held = source.gather(pick.field.name, 0, last)[pick.row : pick.row + 1, pick.heads]
    from_bytes = held.contiguous().flatten(3).view(torch.uint8)
    to_bytes = out.flatten(3).view(torch.uint8)

    def whole(*ends: int) -> Tensor:
        return torch.arange(*ends, dtype=torch.int64, device=out.device)

    first = torch.tensor(places.first, dtype=torch.int64, device=out.device)
    pieces = whole(0, places.pieces * places.step, places.step).unsqueeze(1)
    piece = (pieces + whole(places.size)).flatten()
    items, put = pick.items, whole(len(pick.items))
    taken = from_bytes[:, :, (items // inside)[:, None], first[items % inside][:, None] + piece]
    to_bytes[:, :, (put // inside)[:, None], first[put % inside][:, None] + piece] = taken
