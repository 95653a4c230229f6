"""K or V as packed slots: the formats of the caches, no exact sinks or window."""

from __future__ import annotations

from dataclasses import dataclass, replace
from dataclasses import field as dataclass_field
from math import lcm
from typing import NamedTuple

import torch
from torch import Tensor

from kvpact.cache.segments import ListSource
from kvpact.formats import TILE
from kvpact.kernels import Compute, SegmentSource, StreamPlan
from kvpact.methods import Codec
from kvpact.methods.fitted import FittedCodec
from kvpact.methods.lowrank import LowRankCodec

_CHUNK = 1024
"""Tokens that are decoded at a time."""


class _Slots(NamedTuple):
    codec: Codec
    source: SegmentSource


@dataclass(frozen=True)
class PackedStream:
    """Tokens of K or of V; appending gives a new one.

    A codec that quantises tokens in groups packs whole groups; the tokens behind them are exact.
    Rows of the batch lie beside the heads, so that a fitted codec learns each sequence's own basis.

    Parameters
    ----------
    codec : Codec
        Encodes and decodes; fitted, if it can be.
    slots : dict
        Storage by field name, `[1, N, units, …]` with N = batch x heads.
    open : Tensor
        `[1, N, n, D]`, the tokens of the group that is not complete.
    packed : int
        Tokens in slots.
    energy, lost : float
        Sums of squares of all tokens, and of what came back less what was given.
    compute : Compute
        What encodes and decodes.
    """

    codec: Codec
    slots: dict[str, Tensor]
    open: Tensor
    packed: int = 0
    energy: float = 0.0
    lost: float = 0.0
    compute: Compute = dataclass_field(default_factory=Compute)

    @classmethod
    def empty(cls, codec: Codec, x: Tensor, compute: Compute) -> PackedStream:
        """Return a stream for tokens like `x` (`[1, N, T, D]`) that holds none."""
        return cls(codec, {}, x[:, :, :0].clone(), compute=compute)

    @property
    def unit(self) -> int:
        """Tokens by which storage grows."""
        return lcm(TILE, self.codec.group, *(field.tokens for field in self.codec.fields))

    @property
    def length(self) -> int:
        """Tokens held."""
        return self.packed + self.open.shape[2]

    @property
    def state(self) -> dict[str, Tensor]:
        """What the codec learnt."""
        return self.codec.state()

    @property
    def error(self) -> float:
        """Normalised error `|x - y|^2 / |x|^2` of all tokens held."""
        return self.lost / self.energy if self.energy else self.lost

    def tensors(self) -> dict[str, Tensor]:
        """Return every tensor held, by name."""
        held = {f"slots.{name}": tensor for name, tensor in self.slots.items()}
        held |= {f"state.{name}": tensor for name, tensor in self.state.items()}
        return {**held, "open": self.open} if self.open.numel() else held

    def fitted(self, x: Tensor) -> PackedStream:
        """Return an empty stream whose codec learnt from `x`, if it learns."""
        if isinstance(self.codec, FittedCodec):
            return replace(self, codec=self.codec.fit(x))
        return self

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
        known = torch.cat([self.open, x], dim=2)
        count = known.shape[2] // self.codec.group * self.codec.group
        energy = self.energy + float(x.double().square().sum())
        if not count:
            return replace(self, open=known, energy=energy)
        stream = self._extended(known[:, :, :count], bound)
        slots = stream._encoded(known[:, :, :count])
        stream = replace(
            stream,
            slots=slots,
            open=known[:, :, count:].clone(),
            packed=self.packed + count,
            energy=energy,
        )
        lost = 0.0
        for start in range(0, count, stream._step):
            end = min(start + stream._step, count)
            got = stream.read(self.packed + start, self.packed + end)
            lost += float((got.double() - known[:, :, start:end].double()).square().sum())
        return replace(stream, lost=self.lost + lost)

    def _encoded(self, x: Tensor) -> dict[str, Tensor]:
        """Return copies of the slots with whole groups of tokens behind what they hold."""
        end = self.packed + x.shape[2]
        encoder, prepared = self._plan().prepare(x)
        slots, capacity = self._grown(end, x.device)
        encoder.write(prepared, [slots], capacity, self.packed)
        return slots

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
        return replace(self, codec=codec, slots={new.name: storage})

    def _grown(self, tokens: int, device: torch.device) -> tuple[dict[str, Tensor], int]:
        """Return copies of the slots with room for `tokens` tokens in all, and that room."""
        tokens = -(-tokens // self.unit) * self.unit
        grown = {}
        for field in self.codec.fields:
            storage = field.allocate(1, self.open.shape[1], tokens, device)
            if field.name in self.slots:
                held = self.slots[field.name]
                storage[:, :, : held.shape[2]] = held
            grown[field.name] = storage
        return grown, tokens

    @property
    def _step(self) -> int:
        return -(-_CHUNK // self.unit) * self.unit

    def read(self, start: int, end: int, out: Tensor | None = None) -> Tensor:
        """Return packed tokens decompressed, `[1, N, end - start, D]` in the input's dtype.

        `out`, if given, is where they then are.
        """
        if out is None:
            _, rows, _, dim = self.open.shape
            out = self.open.new_empty(1, rows, end - start, dim)
        source = ListSource((self.slots,), -(-self.packed // self.unit) * self.unit)
        self._plan().decode_slots(_Slots(self.codec, source), start, end, out)
        return out

    def decompress(self) -> Tensor:
        """Return all tokens, `[1, N, T, D]` in the input's dtype."""
        _, rows, _, dim = self.open.shape
        whole = self.open.new_empty(1, rows, self.length, dim)
        for start in range(0, self.packed, self._step):
            end = min(start + self._step, self.packed)
            self.read(start, end, whole[:, :, start:end])
        whole[:, :, self.packed :] = self.open
        return whole
