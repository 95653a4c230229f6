"""K or V as packed slots: the state of a cache's stream without sinks and window."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from dataclasses import field as dataclass_field
from math import lcm, prod
from typing import NamedTuple, Self

import torch
from torch import Tensor

from kvpact.cache.saved import field_info, stream_state
from kvpact.cache.segments import ListSource, SegmentList
from kvpact.cache.stream import Stream
from kvpact.formats import TILE
from kvpact.kernels import Compute, SegmentSource, StreamPlan
from kvpact.methods import Codec
from kvpact.methods.fitted import FittedCodec
from kvpact.methods.lowrank import LowRankCodec
from kvpact.snapshot import StreamState

_CHUNK = 1024
"""Tokens that are decoded at a time."""


def flat(x: Tensor) -> Tensor:
    """Put rows of the batch beside the heads: `[1, B * H, T, D]`."""
    return x.reshape(1, prod(x.shape[:-2]), *x.shape[-2:])


class _Slots(NamedTuple):
    codec: Codec
    source: SegmentSource


@dataclass(frozen=True)
class PackedStream:
    """Tokens of K or of V; appending gives a new stream.

    Rows of the batch lie beside the heads, so that a fitted codec learns each sequence's own basis.

    Parameters
    ----------
    codec : Codec
        Encodes and decodes; fitted, if it can be.
    held : StreamState
        Slots `[1, N, units, …]` with N = batch x heads; the tail is the open group alone.
    energy, lost : float
        Sums of squares of all tokens, and of the differences after compression; NaN where they
        are not known, and then nothing is decompressed to measure them.
    compute : Compute
        What encodes and decodes.
    grown : Stream, optional
        Has the slots in place of `held` where tokens were appended, so that no append copies them.
    """

    codec: Codec
    held: StreamState
    energy: float = 0.0
    lost: float = 0.0
    compute: Compute = dataclass_field(default_factory=Compute)
    grown: Stream | None = None

    @classmethod
    def of(cls, codec: Codec, x: Tensor, compute: Compute, measure: bool = True) -> PackedStream:
        """Return tokens `[1, N, T, D]` compressed; a codec that learns has learnt from them."""
        codec = codec.fit(x) if isinstance(codec, FittedCodec) else codec
        fields = tuple(field_info(field) for field in codec.fields)
        held = StreamState(fields, {}, 0, 0, x[:, :, :0].clone(), None, codec.state())
        known = 0.0 if measure else math.nan
        whole = cls(codec, held, known, known, compute).append(x)
        return replace(whole, held=whole.joined(), grown=None)

    @classmethod
    def blank(cls, codec: Codec, rows: int, tokens: int, dim: int, dtype: torch.dtype) -> Self:
        """Return the storage of so many tokens, all zero, of a codec that learns nothing."""
        packed = tokens - tokens % codec.group
        fields = tuple(field_info(field) for field in codec.fields)
        slots = {
            field.name: field.allocate(1, rows, room(codec, packed), torch.device("cpu"))
            for field in codec.fields
            if packed
        }
        rest = torch.zeros(1, rows, tokens - packed, dim, dtype=dtype, device="cpu")
        held = StreamState(fields, slots, packed, packed, rest, None, codec.state())
        return cls(codec, held, math.nan, math.nan)

    @property
    def error(self) -> float:
        """Normalised error `|x - y|^2 / |x|^2` of all tokens held."""
        return self.lost / self.energy if self.energy else self.lost

    def tensors(self) -> dict[str, Tensor]:
        """Return what is held by name, each tensor in one piece."""
        state = self.joined()
        held = {f"slots.{name}": tensor for name, tensor in state.slots.items()}
        held |= {f"state.{name}": tensor for name, tensor in self.codec.state().items()}
        return {**held, "open": state.tail} if state.tail.numel() else held

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors held, with the room that appends leave."""
        held = self.tensors().values() if self.grown is None else self.grown.tensors()
        return sum(tensor.nbytes for tensor in held)

    def joined(self) -> StreamState:
        """Return what is held with its slots in one piece."""
        return self.held if self.grown is None else owned(stream_state(self.grown))

    def append(self, x: Tensor, bound: float | None = None) -> PackedStream:
        """Return a stream with more tokens, `[1, N, new, D]`; see `CompressedKV.append`."""
        self.codec.check_range(x)
        longer = self._extended(x, bound)
        plan = longer._stream().prepare(x, None)
        plan.write()
        after, held = plan.after, longer.held
        held = replace(held, slots={}, packed=after.packed, start=after.tail_start, tail=after.tail)
        longer = replace(longer, held=held, grown=after)
        if math.isnan(self.energy):
            return longer
        known, lost = torch.cat([self.held.tail, x], 2), 0.0
        for start, again in longer.parts(self.held.packed):
            given = known[:, :, start - self.held.packed :][:, :, : again.shape[2]]
            lost += float((again.double() - given.double()).square().sum())
        energy = float(x.double().square().sum())
        return replace(longer, energy=self.energy + energy, lost=self.lost + lost)

    def _stream(self) -> Stream:
        """Return a cache's stream that holds the same and shares no memory with this one."""
        held, x = self.held, self.held.tail
        if self.grown is not None:
            return self.grown.fork()._replace(plan=self._plan())
        store = SegmentList(self.codec, 1, x.shape[1], x.device)
        stream = Stream.empty(self.codec, x, 0, 0, store, self._plan())
        return stream.restore(held.packed, held.packed, x, None, held.slots)

    def _plan(self) -> StreamPlan:
        return self.compute.stream(self.codec, self.held.tail.device, self.held.tail.dtype)

    def _extended(self, x: Tensor, bound: float | None) -> PackedStream:
        """Return a stream with a basis that holds `x`; tokens held get zeros for what is new."""
        if not self.held.packed or not isinstance(self.codec, LowRankCodec):
            return self
        codec = self.codec.extended(x.to(torch.float32), bound)
        if codec is self.codec:
            return self
        (old,), (new,) = self.codec.fields, codec.fields
        values = old.read(self.joined().slots[old.name])
        values = torch.nn.functional.pad(values, (0, codec.rank - self.codec.rank))
        storage = new.allocate(1, values.shape[1], values.shape[2], values.device)
        new.write(storage, 0, values)
        fields, slots = (field_info(new),), {new.name: storage}
        held = replace(self.held, fields=fields, slots=slots, learnt=codec.state())
        return replace(self, codec=codec, held=held, grown=None)

    def read(self, start: int, end: int) -> Tensor:
        """Return packed tokens decompressed, `[1, N, end - start, D]` in the input's dtype."""
        _, rows, _, dim = self.held.tail.shape
        out = self.held.tail.new_empty(1, rows, end - start, dim)
        source: SegmentSource
        source = ListSource((dict(self.held.slots),), room(self.codec, self.held.packed))
        if self.grown is not None:
            source = self.grown.store.source()
        self._plan().decode_slots(_Slots(self.codec, source), start, end, out)
        return out

    def parts(self, start: int = 0) -> Iterator[tuple[int, Tensor]]:
        """Yield the packed tokens from `start` on, some at a time, with the first one's number."""
        step = room(self.codec, _CHUNK)
        for begin in range(start, self.held.packed, step):
            yield begin, self.read(begin, min(begin + step, self.held.packed))

    def decompress(self) -> Tensor:
        """Return all tokens, `[1, N, T, D]` in the input's dtype."""
        _, rows, _, dim = self.held.tail.shape
        whole = self.held.tail.new_empty(1, rows, self.held.length, dim)
        for start, part in self.parts():
            whole[:, :, start : start + part.shape[2]] = part
        whole[:, :, self.held.packed :] = self.held.tail
        return whole


def room(codec: Codec, tokens: int) -> int:
    """Return the tokens for which storage of `tokens` packed tokens has room: whole units."""
    unit = lcm(TILE, codec.group, *(field.tokens for field in codec.fields))
    return -(-tokens // unit) * unit


def owned(state: StreamState) -> StreamState:
    """Return a state whose tensors hold nothing else in memory, and no sinks."""
    layout = torch.contiguous_format
    slots = {name: x.clone(memory_format=layout) for name, x in state.slots.items()}
    return replace(state, slots=slots, tail=state.tail.clone(memory_format=layout), sinks=None)
