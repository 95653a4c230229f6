"""K or V as packed slots: a cache's stream without sinks and window; and what may be compressed."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from math import lcm, prod

import torch
from torch import Tensor

from kvpact.cache.checks import DTYPES
from kvpact.cache.layer.states import stream_state
from kvpact.cache.stream.segments import SegmentList
from kvpact.cache.stream.stream import Stream
from kvpact.contract import check_dense
from kvpact.errors import DeviceError, DtypeError, GeometryError, NonFiniteError
from kvpact.formats import TILE
from kvpact.kernels import Compute, StreamPlan
from kvpact.methods import Codec
from kvpact.methods.fitted import FittedCodec
from kvpact.methods.lowrank import LowRankCodec
from kvpact.quantizers.numbers import all_finite
from kvpact.snapshot import StreamState

AXES = {3: "[heads, tokens, width]", 4: "[batch, heads, tokens, width]"}


def check_pair(k: Tensor, v: Tensor, dims: int) -> None:
    """Raise a named error unless K and V, of 3 or 4 `dims`, can be compressed together."""
    for name, x in (("k", k), ("v", v)):
        check_dense(name, x)
        if x.dim() != dims:
            raise GeometryError(f"{name} has {x.dim()} dimensions; it should be {AXES[dims]}")
        if x.numel() == 0:
            raise GeometryError(f"{name} is empty: shape {tuple(x.shape)}")
        if x.dtype not in DTYPES:
            raise DtypeError(f"{name} is {x.dtype}; fp32, fp16 and bf16 can be compressed")
    if k.shape[:-1] != v.shape[:-1]:
        raise GeometryError(
            f"k has shape {tuple(k.shape)} and v {tuple(v.shape)}; only the width may differ"
        )
    if k.dtype != v.dtype:
        raise DtypeError(f"k is {k.dtype} and v {v.dtype}; cast one of them")
    if k.device != v.device:
        raise DeviceError(f"k is on {k.device}, v on {v.device}; move one of them")
    for name, x in (("k", k), ("v", v)):
        if not all_finite(x):
            raise NonFiniteError(f"{name} holds NaN or infinity; nothing was compressed")


_CHUNK = 1024
"""Tokens that are decoded at a time."""


def flat(x: Tensor) -> Tensor:
    """Join rows of the batch with the heads: `[1, B * H, T, D]`."""
    return x.reshape(1, prod(x.shape[:-2]), *x.shape[-2:])


def empty_stream(codec: Codec, like: Tensor, compute: Compute) -> Stream:
    """Return a stream without sinks and window for tokens like `[1, N, T, D]` that holds none."""
    store = SegmentList(codec, 1, like.shape[1], like.device)
    return Stream.empty(codec, like, 0, 0, store, compute.stream(codec, like.device, like.dtype))


@dataclass(frozen=True)
class PackedStream:
    """Tokens of K or of V, `[1, B * H, T, D]`; the tail of `stream` is the open group.

    `energy`, `lost`: sums of squares of all tokens and of their errors; NaN, and not measured, if
    unknown.
    """

    stream: Stream
    compute: Compute
    energy: float = math.nan
    lost: float = math.nan

    @classmethod
    def of(cls, codec: Codec, x: Tensor, compute: Compute, measure: bool = True) -> PackedStream:
        """Return tokens `[1, N, T, D]` compressed; a codec that learns does so, unless it has."""
        codec = codec.fit(x) if isinstance(codec, FittedCodec) and not codec.fitted else codec
        known = 0.0 if measure else math.nan
        return cls(empty_stream(codec, x, compute), compute, known, known).append(x)

    @classmethod
    def restored(
        cls, codec: Codec, packed: int, tail: Tensor, slots: Mapping[str, Tensor], compute: Compute
    ) -> PackedStream:
        """Return what lies in slots `[1, N, units, ...]` (zero if none), with a tail of its own."""
        stream = empty_stream(codec, tail, compute).restore(packed, packed, tail, None, slots)
        return cls(stream, compute)

    @property
    def codec(self) -> Codec:
        """Encodes and decodes; fitted, if it can be."""
        return self.stream.codec

    @property
    def held(self) -> StreamState:
        """The state held, each tensor in one piece; slots are copies `[1, N, units, ...]`."""
        state = stream_state(self.stream)
        slots = {name: x.contiguous() for name, x in state.slots.items()}
        return replace(state, slots=slots, tail=state.tail.contiguous(), sinks=None)

    @property
    def error(self) -> float:
        """Normalised error `|x - y|^2 / |x|^2` of all tokens held."""
        return self.lost / self.energy if self.energy else self.lost

    def tensors(self) -> dict[str, Tensor]:
        """Return what is held by name, each tensor in one piece."""
        state = self.held
        held = {f"slots.{name}": tensor for name, tensor in state.slots.items()}
        held |= {f"state.{name}": tensor for name, tensor in self.codec.state().items()}
        return {**held, "open": state.tail} if state.tail.numel() else held

    def _plan(self, codec: Codec) -> StreamPlan:
        """Return the plan to encode and decode; a backend that can't is named when it is to."""
        return self.compute.stream(codec, self.stream.tail.device, self.stream.tail.dtype)

    def append(self, x: Tensor, bound: float | None = None) -> PackedStream:
        """Return a stream with more tokens, `[1, N, new, D]`; full segments are shared with it."""
        self.codec.check_range(x)
        stream = self._extended(x, bound)
        plan = stream.shared()._replace(plan=self._plan(stream.codec)).prepare(x, None, None)
        plan.write()
        longer, packed = replace(self, stream=plan.after), self.stream.packed
        if math.isnan(self.energy):
            return longer
        known, lost = torch.cat([self.stream.tail, x], 2), 0.0
        for start, again in longer.parts(packed):
            given = known[:, :, start - packed :][:, :, : again.shape[2]]
            lost += float((again.double() - given.double()).square().sum())
        energy = float(x.double().square().sum())
        return replace(longer, energy=self.energy + energy, lost=self.lost + lost)

    def _extended(self, x: Tensor, bound: float | None) -> Stream:
        """Return a stream with a basis that holds `x`; tokens held get zeros for what is new."""
        if not self.stream.packed or not isinstance(self.codec, LowRankCodec):
            return self.stream
        codec = self.codec.extended(x.to(torch.float32), bound)
        if codec is self.codec:
            return self.stream
        (old,), (new,), state = self.codec.fields, codec.fields, self.held
        values = old.read(state.slots[old.name])
        values = torch.nn.functional.pad(values, (0, codec.rank - self.codec.rank))
        storage = new.allocate(1, values.shape[1], values.shape[2], values.device)
        new.write(storage, 0, values)
        slots = {new.name: storage}
        return self.restored(codec, state.packed, state.tail, slots, self.compute).stream

    def parts(self, start: int = 0) -> Iterator[tuple[int, Tensor]]:
        """Yield the packed tokens from `start` on, some at a time, with the first one's number."""
        step, end = room(self.codec, _CHUNK), self.stream.packed
        for begin in range(start, end, step):
            yield begin, self.read(begin, min(begin + step, end))

    def read(self, start: int, end: int) -> Tensor:
        """Return packed tokens decompressed, `[1, N, end - start, D]` in the input's dtype."""
        _, rows, _, dim = self.stream.tail.shape
        out = self.stream.tail.new_empty(1, rows, end - start, dim)
        view = self.stream.view(None, lambda: None)
        self._plan(self.codec).decode_slots(view, start, end, out)
        return out

    def decompress(self) -> Tensor:
        """Return all tokens, `[1, N, T, D]` in the input's dtype."""
        tail, packed = self.stream.tail, self.stream.packed
        whole = tail.new_empty(1, tail.shape[1], self.stream.length, tail.shape[3])
        for start, part in self.parts():
            whole[:, :, start : start + part.shape[2]] = part
        whole[:, :, packed:] = tail
        return whole


def room(codec: Codec, tokens: int) -> int:
    """Return the tokens for which storage of `tokens` packed tokens has room: whole units."""
    unit = lcm(TILE, codec.group, *(field.tokens for field in codec.fields))
    return -(-tokens // unit) * unit
