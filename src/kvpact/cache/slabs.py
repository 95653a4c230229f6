"""Slots of consecutive tokens in one tensor: a prompt takes one for K and one for V of a layer."""

from __future__ import annotations

from functools import lru_cache
from itertools import accumulate
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from kvpact.formats import Field
from kvpact.kernels import Segment

REGISTER = 32
"""Fields whose units are multiples of so many bytes lie in front, so that all of these do there."""


class SlabShape(NamedTuple):
    """What a slab is of: fields in the order in which they lie, rows, heads, tokens a segment."""

    fields: tuple[Field, ...]
    batch: int
    heads: int
    tokens: int

    def units(self, field: Field) -> tuple[int, ...]:
        """Return the shape of one segment of a field."""
        return self.batch, self.heads, self.tokens // field.tokens, *field.shape


@lru_cache(maxsize=256)
def slab_shape(fields: tuple[Field, ...], batch: int, heads: int, tokens: int) -> SlabShape:
    """Return a shape, for fields in any order."""

    def place(field: Field) -> tuple[bool, int]:
        return prod(field.shape) * field.dtype.itemsize % REGISTER > 0, -field.dtype.itemsize

    return SlabShape(tuple(sorted(fields, key=place)), batch, heads, tokens)


@lru_cache(maxsize=256)
def _places(shape: SlabShape) -> tuple[dict[str, tuple[Field, int, int]], int]:
    """Return each field with where it would begin and end in one segment, and where that ends."""
    sizes = [prod(shape.units(field)) * field.dtype.itemsize for field in shape.fields]
    ends = list(accumulate(sizes, initial=0))
    places = zip(shape.fields, ends, ends[1:], strict=False)
    return {field.name: (field, begin, end) for field, begin, end in places}, ends[-1]


class Slab:
    """Segments of one shape; each field of all of them lies in one piece.

    Views of fields are made when they are asked for: objects that live on between what a model
    computes keep the heap from giving back what is freed around them.

    - `memory`: `[bytes]` uint8, field by field `[segments, B, H, units, …]`.
    - `count`: the segments that are used, the first ones.
    """

    __slots__ = ("_total", "count", "memory", "shape")

    def __init__(self, shape: SlabShape, memory: Tensor, total: int, count: int) -> None:
        self.shape, self.memory, self._total, self.count = shape, memory, total, count

    @classmethod
    def new(cls, shape: SlabShape, count: int, device: torch.device) -> Slab:
        """Return so many segments of zeros."""
        size = _places(shape)[1] * count
        return cls(shape, torch.zeros(size, dtype=torch.uint8, device=device), count, count)

    def field(self, name: str, whole: bool = False) -> Tensor:
        """Return a field of the segments used, or of all: `[segments, B, H, units, …]`."""
        field, begin, end = _places(self.shape)[0][name]
        held = self.memory[begin * self._total : end * self._total].view(field.dtype)
        return held.view(self._total, *self.shape.units(field))[: None if whole else self.count]

    def where(self, name: str) -> tuple[int, int, int, int]:
        """Return a field's address, and the bytes from a segment, a row, a head to the next."""
        _, begin, end = _places(self.shape)[0][name]
        row = (end - begin) // self.shape.batch
        start = self.memory.data_ptr() + begin * self._total
        return start, end - begin, row, row // self.shape.heads

    def segment(self, index: int) -> Segment:
        """Return a segment."""
        return {field.name: self.field(field.name)[index] for field in self.shape.fields}

    def part(self, first: int, last: int) -> Slab:
        """Return a copy of the segments `first <= i < last`."""
        made = Slab.new(self.shape, last - first, self.memory.device)
        for field in self.shape.fields:
            made.field(field.name).copy_(self.field(field.name)[first:last])
        return made

    def front(self, count: int) -> Slab:
        """Return the first segments where they lie; the memory of all stays."""
        return Slab(self.shape, self.memory, self._total, count)

    def rows(self, indices: Tensor) -> Slab:
        """Return a copy of some rows of the batch."""
        shape = self.shape._replace(batch=len(indices))
        made = Slab.new(shape, self.count, self.memory.device)
        for field in self.shape.fields:
            made.field(field.name).copy_(self.field(field.name).index_select(1, indices))
        return made

    def resized(self, tokens: int) -> Slab:
        """Return a copy in segments of so many tokens, a part of those of now."""
        ratio = self.shape.tokens // tokens
        shape = self.shape._replace(tokens=tokens)
        made = Slab.new(shape, self.count * ratio, self.memory.device)
        for field in self.shape.fields:
            parts = (
                torch.unflatten(self.field(field.name), 3, (ratio, -1)).movedim(3, 1).flatten(0, 1)
            )
            made.field(field.name).copy_(parts)
        return made
