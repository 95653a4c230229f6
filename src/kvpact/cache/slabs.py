"""Slots of consecutive tokens in one tensor: a prompt takes one for K and one for V of a layer."""

from __future__ import annotations

from functools import lru_cache
from itertools import accumulate
from math import prod
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from kvpact.formats import Field
from kvpact.kernels import Segment, Table

REGISTER = 32
"""Fields whose units are multiples of so many bytes lie in front: kernels load whole registers."""


class _Place(NamedTuple):
    """Where a field of one segment begins and ends, and its shape."""

    begin: int
    end: int
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        """Bytes."""
        return self.end - self.begin


class SlabShape:
    """What a slab is of: fields, rows, heads, and the tokens of a segment; see `slab_shape`.

    `places`: where the fields of one segment would lie; `size`: its bytes.
    """

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
    """Segments of one shape; each field of all of them lies in one piece.

    Views of fields are made when they are asked for: objects that live on between what a model
    computes keep the heap from giving back what is freed around them.

    `memory`: `[bytes]` uint8, field by field `[segments, B, H, units, …]`; `count`: the segments
    that are used, the first ones.
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
