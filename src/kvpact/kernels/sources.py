"""Where the slots of a stream lie: segments of consecutive tokens, and what reads them."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import numpy as np
from torch import Tensor

Segment = dict[str, Tensor]
"""Storage of consecutive tokens by field name: `[B, H, units, …]` each."""


class Where(NamedTuple):
    """Where a field of the slots lies in the memory of its device.

    - `segments`: `[segments]` int64: the address of each one's first row and head.
    - `row`, `head`: bytes from one batch row to the next, and from one head to the next.
    """

    segments: np.ndarray[Any, Any]
    row: int
    head: int

    @property
    def address(self) -> int:
        """Where `segments` stands, for native code."""
        found: int = self.segments.__array_interface__["data"][0]
        return found

    @classmethod
    def of_segments(cls, tensors: list[Tensor]) -> Where | None:
        """Return where a field's segments `[B, H, units, …]` lie; None if they are not alike."""
        segments = np.array(list(map(Tensor.data_ptr, tensors)), dtype=np.int64)
        row, head, *_ = tensors[0].stride() if tensors else (0, 0)
        size = tensors[0].itemsize if tensors else 0
        alike = all(map(Tensor.is_contiguous, tensors)) or (
            len(set(map(Tensor.stride, tensors))) == 1 and tensors[0][0, 0].is_contiguous()
        )
        return cls(segments, row * size, head * size) if alike else None


class SegmentSource(Protocol):
    """Reads the storage of a stream's slots, which lies in segments.

    A source never changes: segments that are added, copied or dropped make another source.
    """

    segment_tokens: int
    prepared: dict[str, Any]
    """What each backend, by its name, keeps of where these slots lie."""

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
