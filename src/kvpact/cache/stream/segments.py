"""Storage of a stream's slots: segments of its own, or (see `pages`) pages of a pool."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import lru_cache
from itertools import accumulate
from math import prod
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from kvpact.formats import Field
from kvpact.kernels import Segment, Table, Where, WritableSource
from kvpact.methods import Codec
from kvpact.units import segment_tokens

REGISTER = 32
"""Fields whose units are multiples of so many bytes lie in front: kernels load whole registers."""


class _Place(NamedTuple):
    """The begin, the end and the shape of a field of one segment."""

    begin: int
    end: int
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        """Bytes."""
        return self.end - self.begin


class SlabShape:
    """The shape of slabs; `places`: where fields of a segment would lie; `size`: its bytes."""

    def __init__(self, fields: tuple[Field, ...], batch: int, heads: int, tokens: int) -> None:
        self.fields, self.batch, self.heads, self.tokens = fields, batch, heads, tokens
        ordered = sorted(fields, key=_order)
        units = [(batch, heads, tokens // field.tokens, *field.shape) for field in ordered]
        sizes = (prod(x) * field.dtype.itemsize for x, field in zip(units, ordered, strict=True))
        ends = list(accumulate(sizes, initial=0))
        self.size, found = ends[-1], zip(ordered, ends[:-1], ends[1:], units, strict=True)
        self.places = {x.name: _Place(begin, end, x.dtype, unit) for x, begin, end, unit in found}
        self._offsets: dict[int, Table] = {}

    def offsets(self, total: int) -> Table:
        """Return where each field of each segment begins in a slab of so many."""
        if total not in self._offsets:
            places = [self.places[field.name] for field in self.fields]
            begins = np.array([[place.begin] for place in places], dtype=np.int64)
            sizes = np.array([[place.size] for place in places], dtype=np.int64)
            self._offsets[total] = begins * total + sizes * np.arange(total, dtype=np.int64)
        return self._offsets[total]


def _order(field: Field) -> tuple[bool, int]:
    return prod(field.shape) * field.dtype.itemsize % REGISTER > 0, -field.dtype.itemsize


@lru_cache(maxsize=256)
def slab_shape(fields: tuple[Field, ...], batch: int, heads: int, tokens: int) -> SlabShape:
    """Return a shape: the same object for the same numbers, which is not looked for again."""
    return SlabShape(fields, batch, heads, tokens)


class Slab:
    """Segments of one shape; each field of all lies in one piece, and is viewed when asked for.

    `memory`: `[bytes]` uint8, field by field `[segments, B, H, units, …]`; `count`: those used.
    """

    __slots__ = ("_total", "count", "memory", "shape")

    def __init__(self, shape: SlabShape, memory: Tensor, total: int, count: int) -> None:
        self.shape, self.memory, self._total, self.count = shape, memory, total, count

    @classmethod
    def new(cls, shape: SlabShape, count: int, device: torch.device) -> Slab:
        """Return so many segments of zeros."""
        memory = torch.zeros(shape.size * count, dtype=torch.uint8, device=device)
        return cls(shape, memory, count, count)

    def front(self, count: int) -> Slab:
        """Return the first segments where they lie; the memory of all stays."""
        return Slab(self.shape, self.memory, self._total, count)

    def rows(self, indices: Tensor) -> Slab:
        """Return a copy of some rows of the batch."""
        old = self.shape
        shape = slab_shape(old.fields, len(indices), old.heads, old.tokens)
        made = self.new(shape, self.count, self.memory.device)
        for name in (field.name for field in shape.fields):
            made.field(name).copy_(self.field(name).index_select(1, indices))
        return made

    def field(self, name: str, whole: bool = False) -> Tensor:
        """Return a field of the segments used, or of all: `[segments, B, H, units, …]`."""
        begin, end, dtype, shape = self.shape.places[name]
        held = self.memory[begin * self._total : end * self._total].view(dtype)
        return held.view(self._total, *shape)[: None if whole else self.count]

    def table(self) -> Table:
        """Return where each field of each segment lies."""
        offsets = self.shape.offsets(self._total)
        whole = offsets if self.count == self._total else offsets[:, : self.count]
        found: Table = whole + self.memory.data_ptr()
        return found

    def strides(self, name: str) -> tuple[int, int]:
        """Return the bytes of a field from a row, and from a head, to the next."""
        row = self.shape.places[name].size // self.shape.batch
        return row, row // self.shape.heads

    def segment(self, index: int) -> Segment:
        """Return a segment."""
        return {field.name: self.field(field.name)[index] for field in self.shape.fields}


class SegmentStore(ABC):
    """Storage of one stream in pieces of a fixed number of tokens.

    What a store holds never changes: a call that needs other segments returns another store. One of
    a pool's pages has little to do: it returns itself.
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

    def write(self, name: str, held: Tensor, units: int) -> None:
        """Copy a field `[B, H, n, …]` to the first segments, each of so many units."""
        for index, part in enumerate(torch.split(held, units, 2)):
            self.source().segment(index)[name][:, :, : part.shape[2]] = part

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

    def without_first(self, tokens: int, size: int) -> SegmentStore:
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


class SegmentList(SegmentStore):
    """Segments in slabs, one for what a call adds: a store, and the source that attention reads.

    The first `shared` segments, whole slabs, belong to forks, too, and are never written to.
    """

    def __init__(
        self,
        codec: Codec,
        batch: int,
        heads: int,
        device: torch.device,
        slabs: tuple[Slab, ...] = (),
        shared: int = 0,
    ) -> None:
        self.segment_tokens = (
            slabs[0].shape.tokens if slabs else segment_tokens(codec.group, 0, device.type)
        )
        self._codec, self._shape, self._device = codec, (batch, heads), device
        self._slabs, self._shared = slabs, shared
        self.prepared: dict[str, Any] = {}
        self._wanted: tuple[SlabShape, int] | None = None

    @classmethod
    def new(
        cls, codec: Codec, batch: int, heads: int, device: torch.device, side: str
    ) -> SegmentStore:
        """Return an empty list; it is a `MakeStore`."""
        return cls(codec, batch, heads, device)

    @property
    def _count(self) -> int:
        return sum(slab.count for slab in self._slabs)

    def grown(self, tokens: int, kept: int) -> SegmentList:
        """Copy what is shared and will be written, allocate what is missing."""
        now, shared, held = self.segment_tokens, self._shared, self._count
        size = max(segment_tokens(self._codec.group, tokens, self._device.type), now)
        first, wanted = kept // size, -(-tokens // size)
        if tokens == kept or (wanted <= held and first >= shared and size == now):
            return self
        if size > now:
            return self._with((self._copied(size, 0, wanted, kept),), 0)
        slabs = self._slabs
        if first < shared:
            again = self._copied(size, first * size, shared - first, kept)
            slabs = (*self._front(first), again, *slabs[len(self._front(shared)) :])
        if wanted > held:
            slabs = (*slabs, self._empty(size, wanted - held))
        return self._with(slabs, min(first, shared))

    def _empty(self, size: int, count: int) -> Slab:
        return Slab.new(slab_shape(self._codec.fields, *self._shape, size), count, self._device)

    def _copied(self, size: int, begin: int, count: int, kept: int) -> Slab:
        """Return segments of `size` for tokens from `begin` on, with those in front of `kept`."""
        slab, now = self._empty(size, count), self.segment_tokens
        first, last = begin // now, min(-(-min(begin + count * size, kept) // now), self._count)
        for field in self._codec.fields if last > first else ():
            units = self.gather(field.name, first, last)[:, :, begin % now // field.tokens :]
            parts = torch.split(units, size // field.tokens, 2)
            for part, segment in zip(parts, slab.field(field.name), strict=False):
                segment[:, :, : part.shape[2]] = part
        whole, inside = divmod(max(kept - begin, 0), size)
        if inside and whole < count:  # segments after it are of zeros
            clear_segment(self._codec, slab.segment(whole), inside)
        return slab

    def _front(self, count: int) -> tuple[Slab, ...]:
        """Return the slabs of the first segments, where they lie."""
        front: list[Slab] = []
        for slab in self._slabs:
            if count > 0:
                front.append(slab if slab.count <= count else slab.front(count))
            count -= slab.count
        return tuple(front)

    def write(self, name: str, held: Tensor, units: int) -> None:
        """Copy a field, all whole segments of a slab at once."""
        for slab in self._slabs:
            to, whole = slab.field(name), min(held.shape[2] // units, slab.count)
            part = torch.unflatten(held[:, :, : whole * units], 2, (whole, units))
            to[:whole], held = part.movedim(2, 0), held[:, :, whole * units :]
            if whole < slab.count:
                to[whole, :, :, : held.shape[2]] = held
                return

    def made_for(self, codec: Codec) -> SegmentList:
        """Return an empty list; the same where fields are the same."""
        if codec.fields is self._codec.fields and not self._slabs:
            return self
        return SegmentList(codec, *self._shape, self._device)

    def cut(self, tokens: int) -> SegmentList:
        """Drop later segments; those left of a slab that is cut are copied, so that it goes."""
        size = self.segment_tokens
        count = -(-tokens // size)
        if count >= self._count:
            return self
        slabs = tuple(slab for slab in self._front(count) if slab in self._slabs)
        whole = sum(slab.count for slab in slabs)
        if whole < count:
            slabs += (self._copied(size, whole * size, count - whole, tokens),)
        return self._with(slabs, min(whole, self._shared))

    def without_first(self, tokens: int, size: int) -> SegmentList:
        """Copy later segments."""
        end = self._count * self.segment_tokens
        return self._with((self._copied(size, tokens, (end - tokens) // size, end),), 0)

    def clear_from(self, tokens: int) -> bool:
        """Zero slots; shared segments are cleared when they are copied."""
        size = self.segment_tokens
        for index in range(max(tokens // size, self._shared), self._count):
            clear_segment(self._codec, self.segment(index), max(tokens - index * size, 0))
        return True

    def source(self) -> WritableSource:
        """Return the segments as they are: a list reads itself."""
        return self

    def shared(self) -> SegmentList:
        """Share all segments."""
        other = self._with(self._slabs, self._count)
        other.prepared = self.prepared  # where the same slabs lie, whoever asks first
        return other

    def select(self, indices: Tensor) -> SegmentList:
        """Copy rows."""
        shape = (len(indices), self._shape[1])
        slabs = tuple(slab.rows(indices) for slab in self._slabs)
        return SegmentList(self._codec, *shape, self._device, slabs)

    def _with(self, slabs: tuple[Slab, ...], shared: int) -> SegmentList:
        return SegmentList(self._codec, *self._shape, self._device, slabs, shared)

    def tensors(self, name: str) -> list[Tensor]:
        """Return a field in each slab, with what lies unused there."""
        return [slab.field(name, whole=True) for slab in self._slabs]

    def held_parts(self) -> tuple[Segment, ...]:
        """Return all segments: in which slabs they lie tells only how tokens came."""
        return tuple(map(self.segment, range(self._count)))

    def segment(self, index: int) -> Segment:
        """Return a segment."""
        for slab in self._slabs:
            if index < slab.count:
                return slab.segment(index)
            index -= slab.count
        raise IndexError(index)

    def gather(self, name: str, first: int, last: int) -> Tensor:
        """Return a field's units `[B, H, units, …]` of some segments; a view of one alone."""
        parts = [x for slab in self._slabs for x in slab.field(name)][first:last]
        return parts[0] if len(parts) == 1 else torch.cat(parts, 2)

    def where(self, name: str) -> Where:
        """Return where a field's segments lie."""
        index = [field.name for field in self._codec.fields].index(name)
        row, head = self._slabs[0].strides(name) if self._slabs else (0, 0)
        return Where(self.table(), index, row, head)

    def table(self) -> Table:
        """Return where each field of each segment lies."""
        table = self.prepared.get("addresses")
        if table is None:
            parts = [slab.table() for slab in self._slabs]
            none = np.empty((len(self._codec.fields), 0), dtype=np.int64)
            table = parts[0] if len(parts) == 1 else np.concatenate([none, *parts], 1)
            table = self.prepared.setdefault("addresses", table)  # one, if threads ask at once
        found: Table = table
        return found

    def emptied(self) -> SegmentList:
        """Return a list without memory, of which `filled` makes as many segments of zeros."""
        other = SegmentList(self._codec, *self._shape, self._device)
        if self._slabs:
            other._wanted = self._slabs[0].shape, self._count
        return other

    def filled(self) -> SegmentList:
        """Return a list of as many segments as `emptied` was called on, of zeros."""
        if self._wanted is None:
            return self
        return self._with((Slab.new(*self._wanted, self._device),), 0)
