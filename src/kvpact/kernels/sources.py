"""Where the slots of a stream lie: segments of consecutive tokens, and what reads them."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
from torch import Tensor

Segment = dict[str, Tensor]
"""Storage of consecutive tokens by field name: `[B, H, units, …]` each."""


class Where(NamedTuple):
    """Where a field of the slots lies in the memory of its device.

    Parameters
    ----------
    segments : ndarray
        `[segments]` int64: the address of each one's first row and head.
    row, head : int
        Bytes from one batch row to the next, and from one head to the next.
    """

    segments: np.ndarray[Any, Any]
    row: int
    head: int

    @property
    def address(self) -> int:
        """Where the addresses stand, for native code."""
        return int(self.segments.ctypes.data)


class PlacedSegments(Sequence[Segment]):
    """Segments that know where they lie, so that nobody has to look at each of them."""

    @abstractmethod
    def where(self, name: str) -> Where | None:
        """Return where a field lies in memory; see `SegmentSource.where`."""


class SegmentSource(Protocol):
    """Reads the storage of a stream's slots, which lies in segments.

    A source never changes: segments that are added, copied or dropped make another source.
    """

    segment_tokens: int
    prepared: dict[str, Any]
    """What each backend, by its name, keeps of where these slots lie."""

    def gather(self, name: str, first: int, last: int) -> Tensor:
        """Return a field's units `[B, H, units, …]` of the segments `first <= i < last`."""
        ...

    def where(self, name: str) -> Where | None:
        """Return where a field lies in memory; None where segments differ in strides or have gaps.

        What is returned is valid while the source lives.
        """
        ...
