"""Where a stream's slots come from: segments of its own, or (see `pages`) pages of a pool."""

from __future__ import annotations

from math import lcm
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from kvpact.kernels import Segment, SegmentSource
from kvpact.methods import Codec

SEGMENT_TOKENS = 128


class SegmentStore(Protocol):
    """Storage of one stream in pieces of a fixed number of tokens."""

    segment_tokens: int

    def missing(self, tokens: int) -> list[Segment]:
        """Return the segments that `tokens` tokens need beyond those there; changes nothing."""
        ...

    def extend(self, segments: list[Segment]) -> None:
        """Add what `missing` returned."""
        ...

    def segment(self, index: int) -> Segment:
        """Return a segment, to be written to after `own`."""
        ...

    def own(self, index: int) -> bool:
        """Make a segment this stream's alone; False if it stays shared (and may not change)."""
        ...

    def keep(self, count: int) -> None:
        """Drop all but the first `count` segments."""
        ...

    def source(self) -> SegmentSource:
        """Return what attention reads from; it stays as it is when segments are added."""
        ...

    def fork(self) -> SegmentStore:
        """Return a store that shares the segments."""
        ...

    def select(self, indices: Tensor) -> SegmentStore:
        """Return a store with the given batch rows."""
        ...

    def tensors(self, name: str) -> list[Tensor]:
        """Return the tensors of a field that belong to this stream."""
        ...


class SegmentList:
    """Segments allocated one by one; a fork shares them until one side writes.

    Parameters
    ----------
    codec : Codec
        Whose fields are stored.
    batch, heads : int
        Rows and heads.
    device : torch.device
        Where the segments live.
    """

    def __init__(self, codec: Codec, batch: int, heads: int, device: torch.device) -> None:
        self.segment_tokens = lcm(SEGMENT_TOKENS, codec.group)
        self._codec, self._shape, self._device = codec, (batch, heads), device
        self._segments: list[Segment] = []
        self._owned: list[bool] = []
        self._source: ListSource | None = None

    def missing(self, tokens: int) -> list[Segment]:
        """Allocate what is missing."""
        count = -(-tokens // self.segment_tokens) - len(self._segments)
        return [
            {
                field.name: field.allocate(*self._shape, self.segment_tokens, self._device)
                for field in self._codec.fields
            }
            for _ in range(count)
        ]

    def extend(self, segments: list[Segment]) -> None:
        """Add new segments."""
        if segments:
            self._source = None
        self._segments += segments
        self._owned += [True] * len(segments)

    def segment(self, index: int) -> Segment:
        """Return a segment."""
        return self._segments[index]

    def own(self, index: int) -> bool:
        """Copy a segment that a fork shares."""
        if not self._owned[index]:
            shared = self._segments[index]
            self._segments[index] = {name: tensor.clone() for name, tensor in shared.items()}
            self._owned[index] = True
            self._source = None
        return True

    def keep(self, count: int) -> None:
        """Drop later segments."""
        if count < len(self._segments):
            self._source = None
        del self._segments[count:], self._owned[count:]

    def source(self) -> SegmentSource:
        """Return the segments as they are now."""
        if self._source is None:
            self._source = ListSource(tuple(self._segments), self.segment_tokens)
        return self._source

    def fork(self) -> SegmentList:
        """Share all segments."""
        self._owned = [False] * len(self._segments)
        other = self._copy()
        other._segments, other._owned = list(self._segments), list(self._owned)
        return other

    def select(self, indices: Tensor) -> SegmentList:
        """Copy rows."""
        other = self._copy()
        other._shape = (len(indices), self._shape[1])
        other.extend(
            [
                {name: tensor.index_select(0, indices) for name, tensor in segment.items()}
                for segment in self._segments
            ]
        )
        return other

    def _copy(self) -> SegmentList:
        return SegmentList(self._codec, *self._shape, self._device)

    def tensors(self, name: str) -> list[Tensor]:
        """Return a field's tensors."""
        return [segment[name] for segment in self._segments]


class PointerTable:
    """Addresses of segments that have a shape and strides in common.

    Parameters
    ----------
    tensors : list of Tensor
        `[B, H, units, …]` each.
    """

    def __init__(self, tensors: list[Tensor]) -> None:
        self._tensors = tensors
        self.entry: tuple[int, int, int] | None = (0, 0, 0)
        if not tensors:
            return
        self._array = np.array([tensor.data_ptr() for tensor in tensors], dtype=np.int64)
        strides = {tensor.stride() for tensor in tensors}
        row, head, *_ = tensors[0].stride()
        size = tensors[0].element_size()
        regular = len(strides) == 1 and tensors[0][0, 0].is_contiguous()
        self.entry = (int(self._array.ctypes.data), row * size, head * size) if regular else None


class ListSource:
    """Reads segments by joining them."""

    def __init__(self, segments: tuple[Segment, ...], segment_tokens: int) -> None:
        self._segments, self.segment_tokens = segments, segment_tokens
        self._pointers: dict[str, PointerTable] = {}
        self.prepared: dict[str, Any] = {}

    def gather(self, name: str, first: int, last: int) -> Tensor:
        """Return a field's units of the segments `first <= i < last`."""
        parts = [segment[name] for segment in self._segments[first:last]]
        return parts[0] if len(parts) == 1 else torch.cat(parts, 2)

    def addresses(self, name: str) -> tuple[int, int, int] | None:
        """Return where a field's segments lie."""
        found = self._pointers.get(name)
        if found is None:
            found = self._pointers[name] = PointerTable([s[name] for s in self._segments])
        return found.entry
