"""K or V as packed slots: the state of a cache's stream without sinks and window."""

from __future__ import annotations

from dataclasses import dataclass, replace
from dataclasses import field as dataclass_field
from math import lcm, prod
from typing import NamedTuple

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
        Sums of squares of all tokens, and of the differences after compression.
    compute : Compute
        What encodes and decodes.
    """

    codec: Codec
    held: StreamState
    energy: float = 0.0
    lost: float = 0.0
    compute: Compute = dataclass_field(default_factory=Compute)

    @classmethod
    def fitted(cls, codec: Codec, x: Tensor, compute: Compute) -> PackedStream:
        """Return a stream for tokens like `x` (`[1, N, T, D]`) that holds none.

        A codec that learns from tokens has learnt from `x`.
        """
        codec = codec.fit(x) if isinstance(codec, FittedCodec) else codec
        fields = tuple(field_info(field) for field in codec.fields)
        held = StreamState(fields, {}, 0, 0, x[:, :, :0].clone(), None, codec.state())
        return cls(codec, held, compute=compute)

    @property
    def slots(self) -> dict[str, Tensor]:
        """Storage by field name."""
        return dict(self.held.slots)

    @property
    def open(self) -> Tensor:
        """`[1, N, n, D]`, the tokens of the group that is not complete."""
        return self.held.tail

    @property
    def packed(self) -> int:
        """Tokens in slots."""
        return self.held.packed

    @property
    def length(self) -> int:
        """Tokens held."""
        return self.held.length

    @property
    def error(self) -> float:
        """Normalised error `|x - y|^2 / |x|^2` of all tokens held."""
        return self.lost / self.energy if self.energy else self.lost

    def tensors(self) -> dict[str, Tensor]:
        """Return every tensor held, by name."""
        held = {f"slots.{name}": tensor for name, tensor in self.slots.items()}
        held |= {f"state.{name}": tensor for name, tensor in self.codec.state().items()}
        return {**held, "open": self.open} if self.open.numel() else held

    def append(self, x: Tensor, bound: float | None = None) -> PackedStream:
        """Return a stream with more tokens; this one stays as it is.

        Parameters
        ----------
        x : Tensor
            `[1, N, new, D]`.
        bound : float, optional
            See `LowRankCodec.extended`.

        Raises
        ------
        NonFiniteError
            A token that the codec can't hold.
        """
        self.codec.check_range(x)
        longer = self._extended(x, bound)
        plan = longer._stream().prepare(x, None, 0)
        plan.write()
        energy = self.energy + float(x.double().square().sum())
        longer = replace(longer, held=_own(stream_state(plan.after)), energy=energy)
        known, lost, step = torch.cat([self.open, x], dim=2), 0.0, room(self.codec, _CHUNK)
        for start in range(self.packed, longer.packed, step):
            end = min(start + step, longer.packed)
            given = known[:, :, start - self.packed : end - self.packed].double()
            lost += float((longer.read(start, end).double() - given).square().sum())
        return replace(longer, lost=self.lost + lost)

    def _stream(self) -> Stream:
        """Return a cache's stream that holds the same and shares no memory with this one."""
        x, codec = self.open, self.codec
        store = SegmentList(codec, 1, x.shape[1], x.device)
        stream = Stream.empty(codec, x, 0, 0, store, self._plan())
        return stream.restore(self.packed, self.packed, x, None, self.slots)

    def _plan(self) -> StreamPlan:
        return self.compute.stream(self.codec, self.open.device, self.open.dtype)

    def _extended(self, x: Tensor, bound: float | None) -> PackedStream:
        """Return a stream with a basis that holds `x`; tokens held get zeros for what is new."""
        if not self.packed or not isinstance(self.codec, LowRankCodec):
            return self
        codec = self.codec.extended(x.to(torch.float32), bound)
        if codec is self.codec:
            return self
        (old,), (new,) = self.codec.fields, codec.fields
        values = old.read(self.slots[old.name])
        values = torch.nn.functional.pad(values, (0, codec.rank - self.codec.rank))
        storage = new.allocate(1, values.shape[1], values.shape[2], values.device)
        new.write(storage, 0, values)
        fields, slots = (field_info(new),), {new.name: storage}
        held = replace(self.held, fields=fields, slots=slots, learnt=codec.state())
        return replace(self, codec=codec, held=held)

    def read(self, start: int, end: int, out: Tensor | None = None) -> Tensor:
        """Return packed tokens decompressed, `[1, N, end - start, D]` in the input's dtype.

        `out`, if given, is where they then are.
        """
        if out is None:
            _, rows, _, dim = self.open.shape
            out = self.open.new_empty(1, rows, end - start, dim)
        source = ListSource((self.slots,), room(self.codec, self.packed))
        self._plan().decode_slots(_Slots(self.codec, source), start, end, out)
        return out

    def decompress(self) -> Tensor:
        """Return all tokens, `[1, N, T, D]` in the input's dtype."""
        _, rows, _, dim = self.open.shape
        whole = self.open.new_empty(1, rows, self.length, dim)
        step = room(self.codec, _CHUNK)
        for start in range(0, self.packed, step):
            end = min(start + step, self.packed)
            self.read(start, end, whole[:, :, start:end])
        whole[:, :, self.packed :] = self.open
        return whole


def room(codec: Codec, tokens: int) -> int:
    """Return the tokens for which storage of `tokens` packed tokens has room: whole units."""
    unit = lcm(TILE, codec.group, *(field.tokens for field in codec.fields))
    return -(-tokens // unit) * unit


def without_window(state: StreamState, rest: Tensor | None = None) -> StreamState:
    """Return a cache's stream as rows beside the heads, without sinks and window.

    Parameters
    ----------
    state : StreamState
        `[B, H, …]`.
    rest : Tensor, optional
        `[B, H, n, D]`, the tokens of the open group, where the tail does not hold them all.
    """
    rest = state.tail[:, :, state.packed - state.start :] if rest is None else rest
    packed = state.length - rest.shape[2]
    slots = {
        info.name: state.slots[info.name][:, :, : -(-packed // info.tokens)].flatten(0, 1)[None]
        for info in state.fields
        if packed
    }
    return _own(replace(state, slots=slots, packed=packed, start=packed, tail=flat(rest)))


def _own(state: StreamState) -> StreamState:
    """Return a state whose tensors hold nothing else in memory, and no sinks."""
    layout = torch.contiguous_format
    slots = {name: x.clone(memory_format=layout) for name, x in state.slots.items()}
    return replace(state, slots=slots, tail=state.tail.clone(memory_format=layout), sinks=None)
