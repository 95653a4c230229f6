"""Slots written and read by the torch bodies: the bytes and numbers that every backend gives."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from kvpact.arithmetic import saturated
from kvpact.kernels.base import SlotReader
from kvpact.kernels.offset import RowRotation
from kvpact.kernels.sources import WritableSource
from kvpact.kernels.views import StreamView
from kvpact.methods import Arrays, Codec


def copies(codec: Codec) -> bool:
    """Return whether slots have numbers as they are given: no kernel is needed to write them."""
    return codec.exact and codec.form is not None and codec.form.kind == "raw"


class TorchEncoder:
    """Encodes with the codec's own `encode`; its fields write the arrays."""

    def __init__(self, codec: Codec) -> None:
        self._codec = codec

    def prepare(
        self, x: Tensor, size: float | None = None, frozen: Arrays | None = None
    ) -> dict[str, Tensor]:
        """Return the encoded arrays of `[B, H, T, D]` (see `Codec.encode`)."""
        return self._codec.encode(x.to(torch.float32), frozen)

    def write(self, prepared: Arrays, source: WritableSource, start: int) -> None:
        """Write arrays into segments."""
        tokens = source.segment_tokens
        for field in self._codec.fields:
            if field.name not in prepared:
                continue
            values, done = prepared[field.name], 0
            unit = field.tokens if field.per_group else 1
            while done < values.shape[2]:
                index, inside = divmod(start + done * unit, tokens)
                take = min((tokens - inside) // unit, values.shape[2] - done)
                part = values[:, :, done : done + take]
                field.write(source.segment(index)[field.name], inside, part)
                done += take


Decode = Callable[[Arrays], Tensor]


def read_slots(slots: SlotReader, start: int, end: int, decode: Decode | None = None) -> Tensor:
    """Decode packed tokens, still transformed: fp32; `decode` takes the place of `codec.decode`."""
    size = slots.source.segment_tokens
    first, last = start // size, -(-end // size)
    arrays = {
        field.name: field.read(slots.source.gather(field.name, first, last))
        for field in slots.codec.fields
    }
    offset = first * size
    return (decode or slots.codec.decode)(arrays)[:, :, start - offset : end - offset]


def read(view: StreamView, start: int, end: int, decode: Decode | None = None) -> Tensor:
    """Decode packed tokens, transformed, without offset but rotated, sinks in their places.

    With `decode` in place of `codec.decode`, sink tokens are zero.
    """
    make = view.codec.transform.forward if decode is None else torch.zeros_like
    y = read_slots(view, start, end, decode).clone()
    if isinstance(view.offset, RowRotation):
        y = view.offset.put_back(y, start)
    return view.place_sinks(y, start, make)


def decode_slots(slots: SlotReader, start: int, end: int, out: Tensor, *, inverse: bool) -> None:
    """Decode packed tokens; parameters as of `Backend.decode`."""
    y = read_slots(slots, start, end)
    out.copy_(saturated(slots.codec.transform.inverse(y) if inverse else y, out.dtype))
