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
"""Fields whose units are multiples of so many bytes lie in front: kernels load whole registers."""


class SlabShape(NamedTuple):
    """What a slab is of: fields, rows, heads, and the tokens of a segment."""

    fields: tuple[Field, ...]
    batch: int
    heads: int
    tokens: int


class _Place(NamedTuple):
    """Where a field of one segment begins and ends, and its shape."""

    begin: int
    end: int
    dtype: torch.dtype
    shape: tuple[int, ...]


@lru_cache(maxsize=256)
def _places(shape: SlabShape) -> tuple[dict[str, _Place], int]:
    """Return where the fields of one segment would lie, and where that would end."""
    fields, batch, heads, tokens = shape

    def order(field: Field) -> tuple[bool, int]:
        return prod(field.shape) * field.dtype.itemsize % REGISTER > 0, -field.dtype.itemsize

    ordered = sorted(fields, key=order)
    units = [(batch, heads, tokens // field.tokens, *field.shape) for field in ordered]
    sizes = (prod(x) * field.dtype.itemsize for x, field in zip(units, ordered, strict=True))
    ends = list(accumulate(sizes, initial=0))
    found = zip(ordered, ends[:-1], ends[1:], units, strict=True)
    return {x.name: _Place(begin, end, x.dtype, unit) for x, begin, end, unit in found}, ends[-1]


class Slab:
    """Segments of one shape; each field of all of them lies in one piece.

    Views of fields are made when they are asked for: objects that live on between what a model
    computes keep the heap from giving back what is freed around them.

    `memory`: `[bytes]` uint8, field by field `[segments, B, H, units, …]`; `count`: the segments
    that are used, the first ones.
    """

    __slots__ = ("_places", "_total", "count", "memory", "shape")

    def __init__(self, shape: SlabShape, memory: Tensor, total: int, count: int) -> None:
        self.shape, self.memory, self._total, self.count = shape, memory, total, count
        self._places = _places(shape)[0]

    @classmethod
    def new(cls, shape: SlabShape, count: int, device: torch.device) -> Slab:
        """Return so many segments of zeros."""
        memory = torch.zeros(_places(shape)[1] * count, dtype=torch.uint8, device=device)
        return cls(shape, memory, count, count)

    def front(self, count: int) -> Slab:
        """Return the first segments where they lie; the memory of all stays."""
        return Slab(self.shape, self.memory, self._total, count)

    def rows(self, indices: Tensor) -> Slab:
        """Return a copy of some rows of the batch."""
        shape = self.shape._replace(batch=len(indices))
        made = self.new(shape, self.count, self.memory.device)
        for name in (field.name for field in shape.fields):
            made.field(name).copy_(self.field(name).index_select(1, indices))
        return made

    def field(self, name: str, whole: bool = False) -> Tensor:
        """Return a field of the segments used, or of all: `[segments, B, H, units, …]`."""
        begin, end, dtype, shape = self._places[name]
        held = self.memory[begin * self._total : end * self._total].view(dtype)
        return held.view(self._total, *shape)[: None if whole else self.count]

    def where(self, name: str) -> tuple[int, int, int, int]:
        """Return a field's address, and the bytes from a segment, a row, a head to the next."""
        place = self._places[name]
        size = place.end - place.begin
        row = size // self.shape.batch
        start = self.memory.data_ptr() + place.begin * self._total
        return start, size, row, row // self.shape.heads

    def segment(self, index: int) -> Segment:
        """Return a segment."""
        return {field.name: self.field(field.name)[index] for field in self.shape.fields}
