"""Where a stream's slots come from: segments of its own, or (see `pages`) pages of a pool."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from itertools import repeat

import torch
from torch import Tensor

from kvpact.kernels import ListSource, Segment, WritableSource
from kvpact.methods import Codec
from kvpact.units import segment_tokens


class SegmentStore(ABC):
    """Storage of one stream in pieces of a fixed number of tokens.

    What a store holds never changes, only what is written into it: a call that needs more, fewer or
    other segments returns another store. One of a pool's pages has little to do: it returns itself.
    """

    segment_tokens: int

    @abstractmethod
    def grown(self, tokens: int, kept: int) -> SegmentStore:
        """Return a store with room for `tokens` tokens; what is shared from `kept` on is copied."""

    @abstractmethod
    def clear_from(self, tokens: int) -> bool:
        """Zero the slots from `tokens` on; False if some are shared and stay as they are."""

    @abstractmethod
    def source(self) -> WritableSource:
        """Return what attention reads from; it stays as it is when segments are added."""

    def made_for(self, codec: Codec) -> SegmentStore:
        """Return an empty store for the stream's codec after it has learnt."""
        raise NotImplementedError("codecs of pages have learnt before")

    def select(self, indices: Tensor) -> SegmentStore:
        """Return a store with the given batch rows."""
        raise NotImplementedError("rows of a paged cache are sequences")

    def writable(self, tokens: int, kept: int) -> int:
        """Return up to which token slots from `kept` on can be written, `tokens` at most."""
        return tokens

    def cut(self, tokens: int) -> SegmentStore:
        """Return a store without the segments that `tokens` tokens do not need."""
        return self

    def behind(self, tokens: int, size: int) -> SegmentStore:
        """Return a store without the first tokens, whole segments of `size`, its own or less."""
        raise NotImplementedError("sequences of a paged cache keep their pages")

    def shared(self) -> SegmentStore:
        """Return a store of the same segments that writes to none of them."""
        return self

    def tensors(self, name: str) -> list[Tensor]:
        """Return the tensors of a field that belong to this stream."""
        return []


MakeStore = Callable[[Codec, int, int, torch.device, str], SegmentStore]
"""Makes the store of a stream: codec, batch, heads, device, side (``k`` or ``v``)."""


def clear_segment(codec: Codec, segment: Segment, start: int) -> None:
    """Zero what a segment holds of its tokens from `start` on."""
    for field in codec.fields:
        field.clear_from(segment[field.name], start)


class SegmentList(ListSource, SegmentStore):
    """Segments allocated one by one: a store, and the source that attention reads.

    The first `shared` segments belong to forks, too, and are never written to.
    """

    def __init__(
        self,
        codec: Codec,
        batch: int,
        heads: int,
        device: torch.device,
        segments: tuple[Segment, ...] = (),
        shared: int = 0,
        size: int = 0,
    ) -> None:
        if not size:
            size = segment_tokens(codec.group, 0, device.type)
            for field in codec.fields[:1] if segments else ():
                size = segments[0][field.name].shape[2] * field.tokens
        super().__init__(segments, size)
        self._codec, self._shape, self._device, self._shared = codec, (batch, heads), device, shared

    @classmethod
    def new(
        cls, codec: Codec, batch: int, heads: int, device: torch.device, side: str
    ) -> SegmentStore:
        """Return an empty list; it is a `MakeStore`."""
        return cls(codec, batch, heads, device)

    def grown(self, tokens: int, kept: int) -> SegmentList:
        """Copy what is shared and will be written, allocate what is missing."""
        size = max(
            segment_tokens(self._codec.group, tokens, self._device.type), self.segment_tokens
        )
        first, shared, larger = kept // size, self._shared, size > self.segment_tokens
        missing = -(-tokens // size) - len(self._segments)
        if tokens == kept or (missing <= 0 and first >= shared and not larger):
            return self
        segments = self._joined(size, kept) if larger else list(self._segments)
        for index in range(first, 0 if larger else shared):
            segments[index] = {name: x.clone() for name, x in segments[index].items()}
            start = max(kept - index * self.segment_tokens, 0)
            clear_segment(self._codec, segments[index], start)
        segments += self._empty(size, -(-tokens // size) - len(segments))
        shared = 0 if larger else min(first, shared)
        return SegmentList(self._codec, *self._shape, self._device, tuple(segments), shared, size)

    def _empty(self, size: int, count: int) -> list[Segment]:
        """Return new segments."""
        segments: list[Segment] = list(map(dict, repeat((), count)))
        for field in self._codec.fields:
            shape = (*self._shape, size // field.tokens, *field.shape)
            for segment in segments:
                segment[field.name] = torch.zeros(shape, dtype=field.dtype, device=self._device)
        return segments

    def _joined(self, size: int, kept: int) -> list[Segment]:
        """Return the tokens in front of `kept` in larger segments; that happens once."""
        segments, ratio = [], size // self.segment_tokens
        for index in range(-(-kept // size)):
            whole = self._empty(size, 1)[0]
            for place, part in enumerate(self._segments[index * ratio : (index + 1) * ratio]):
                for name, held in part.items():
                    units = held.shape[2]
                    whole[name][:, :, place * units : (place + 1) * units] = held
            clear_segment(self._codec, whole, min(kept - index * size, size))
            segments.append(whole)
        return segments

    def made_for(self, codec: Codec) -> SegmentList:
        """Return an empty list; the same where fields are the same."""
        if codec.fields is self._codec.fields and not self._segments:
            return self
        return SegmentList(codec, *self._shape, self._device)

    def cut(self, tokens: int) -> SegmentList:
        """Drop later segments."""
        count = -(-tokens // self.segment_tokens)
        if count >= len(self._segments):
            return self
        return self._with(self._segments[:count], min(count, self._shared))

    def behind(self, tokens: int, size: int) -> SegmentList:
        """Drop earlier segments; in smaller ones the others are copied."""
        count, ratio = tokens // size, self.segment_tokens // size
        if ratio == 1:
            return self._with(self._segments[count:], max(self._shared - count, 0))
        first = count // ratio
        parts = [
            {name: x.chunk(ratio, 2)[part].clone() for name, x in segment.items()}
            for segment in self._segments[first:]
            for part in range(ratio)
        ]
        return self._with(tuple(parts[count - first * ratio :]), 0)

    def clear_from(self, tokens: int) -> bool:
        """Zero slots; shared segments are cleared when they are copied."""
        size = self.segment_tokens
        for index in range(max(tokens // size, self._shared), len(self._segments)):
            clear_segment(self._codec, self._segments[index], max(tokens - index * size, 0))
        return True

    def source(self) -> WritableSource:
        """Return the segments as they are: a list reads itself."""
        return self

    def shared(self) -> SegmentList:
        """Share all segments."""
        other = self._with(self._segments, len(self._segments))
        other._where, other.prepared = self._where, self.prepared
        return other

    def select(self, indices: Tensor) -> SegmentList:
        """Copy rows."""
        segments = tuple(
            {name: tensor.index_select(0, indices) for name, tensor in segment.items()}
            for segment in self._segments
        )
        shape = (len(indices), self._shape[1])
        return SegmentList(self._codec, *shape, self._device, segments)

    def _with(self, segments: tuple[Segment, ...], shared: int) -> SegmentList:
        return SegmentList(self._codec, *self._shape, self._device, segments, shared)

    def tensors(self, name: str) -> list[Tensor]:
        """Return a field's tensors."""
        return [segment[name] for segment in self._segments]
