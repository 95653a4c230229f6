"""One stream (K or V of a layer): packed slots in segments, exact sink tokens, exact tail.

Every token is packed as soon as its group is complete, once. Beside the slots stand exact copies:
the *sinks* (each row's first tokens) and the *tail* (the window, and the open group, which has no
slots yet). The tail begins at or before the first token without slots:

    tokens:  0 ………………… exact_from ……… packed ……… length
             [ packed slots                     ]
                          [ tail                        ]

A rollback inside the tail is exact. Where it cuts into a group whose tokens are no longer all in
the tail, what was packed stays packed: the group keeps its side information, and tokens that come
later are coded with it, at once, until the group is complete.

Segments are fixed numbers of tokens; growing never copies. A fork shares them: each side copies a
segment before it writes to it.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import lcm

import torch
from torch import Tensor

from kvpact.methods import Codec

SEGMENT_TOKENS = 128
Segment = dict[str, Tensor]


@dataclass(frozen=True)
class _Piece:
    """Encoded arrays and the token that they begin with."""

    start: int
    arrays: dict[str, Tensor]


@dataclass(frozen=True)
class AppendPlan:
    """All that an append will change; made without changing anything."""

    pieces: list[_Piece]
    packed: int
    tail_start: int
    tail: Tensor
    sinks: Tensor | None
    segments: list[Segment]


class Stream:
    """Slots and exact tokens of one stream.

    Parameters
    ----------
    codec : Codec
        Encodes and decodes.
    batch, heads, dim : int
        Shape of the vectors.
    sinks, window : int
        Exact tokens at the beginning and at the end.
    dtype : torch.dtype
        Dtype of the exact tokens.
    device : torch.device
        Where everything lives.
    """

    def __init__(
        self,
        codec: Codec,
        batch: int,
        heads: int,
        dim: int,
        sinks: int,
        window: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.codec, self.window = codec, window
        self.segment_tokens = lcm(SEGMENT_TOKENS, codec.group)
        self.segments: list[Segment] = []
        self._owned: list[bool] = []
        self.packed = 0
        self.tail = torch.zeros(batch, heads, 0, dim, dtype=dtype, device=device)
        self._tail_start = 0
        self.sinks: Tensor | None = None
        if sinks:
            self.sinks = torch.zeros(batch, heads, sinks, dim, dtype=dtype, device=device)

    @property
    def length(self) -> int:
        """Tokens held."""
        return self._tail_start + self.tail.shape[2]

    def _new_segment(self) -> Segment:
        batch, heads = self.tail.shape[:2]
        return {
            field.name: field.allocate(batch, heads, self.segment_tokens, self.tail.device)
            for field in self.codec.fields
        }

    def prepare(self, x: Tensor, sink_positions: Tensor | None) -> AppendPlan:
        """Encode tokens and allocate what they need; the stream stays as it is.

        Parameters
        ----------
        x : Tensor
            `[B, H, new, D]`, checked.
        sink_positions : Tensor or None
            `[B, S]`: where each row's sink tokens stand.
        """
        length = self.length + x.shape[2]
        known = torch.cat([self.tail, x.to(self.tail.dtype)], dim=2)
        pieces, packed = self._encode(known, length)
        start = max(self._tail_start, min(packed, length - self.window))
        # A slice would keep the whole of `known` alive behind it.
        tail = (
            known if start == self._tail_start else known[:, :, start - self._tail_start :].clone()
        )
        missing = -(-packed // self.segment_tokens) - len(self.segments)
        segments = [self._new_segment() for _ in range(missing)]
        sinks = self._fill_sinks(x, sink_positions)
        return AppendPlan(pieces, packed, start, tail, sinks, segments)

    def _encode(self, known: Tensor, length: int) -> tuple[list[_Piece], int]:
        pieces, packed, group = [], self.packed, self.codec.group
        cut = packed % group
        if cut and packed < length:
            end = min(packed + group - cut, length)
            x = known[:, :, packed - self._tail_start : end - self._tail_start].float()
            pieces.append(_Piece(packed, self.codec.encode(x, self._group_at(packed))))
            packed = end
        end = packed + (length - packed) // group * group if packed % group == 0 else packed
        if end > packed:
            x = known[:, :, packed - self._tail_start : end - self._tail_start].float()
            pieces.append(_Piece(packed, self.codec.encode(x)))
        return pieces, max(end, packed)

    def _group_at(self, token: int) -> Segment:
        """Side information of the group that a token is in, `[B, H, 1, …]` by field name."""
        segment, inside = divmod(token, self.segment_tokens)
        index = inside // self.codec.group
        return {
            field.name: field.read(self.segments[segment][field.name])[:, :, index : index + 1]
            for field in self.codec.fields
            if field.per_group
        }

    def _fill_sinks(self, x: Tensor, positions: Tensor | None) -> Tensor | None:
        if self.sinks is None or positions is None:
            return self.sinks
        source = positions - self.length
        row, slot = ((source >= 0) & (source < x.shape[2])).nonzero(as_tuple=True)
        if not len(row):
            return self.sinks
        sinks = self.sinks.clone()
        sinks[row, :, slot] = x[row, :, source[row, slot]].to(sinks.dtype)
        return sinks

    def commit(self, plan: AppendPlan) -> None:
        """Carry out a plan."""
        self.segments += plan.segments
        self._owned += [True] * len(plan.segments)
        for piece in plan.pieces:
            self._write(piece)
        self.packed, self._tail_start = plan.packed, plan.tail_start
        self.tail, self.sinks = plan.tail, plan.sinks

    def _write(self, piece: _Piece) -> None:
        for field in self.codec.fields:
            if field.name not in piece.arrays:
                continue
            values, done = piece.arrays[field.name], 0
            unit = field.tokens if field.per_group else 1
            while done < values.shape[2]:
                token = piece.start + done * unit
                segment, inside = divmod(token, self.segment_tokens)
                take = min((self.segment_tokens - inside) // unit, values.shape[2] - done)
                self._own(segment)
                part = values[:, :, done : done + take]
                field.write(self.segments[segment][field.name], inside, part)
                done += take

    def _own(self, segment: int) -> None:
        if not self._owned[segment]:
            shared = self.segments[segment]
            self.segments[segment] = {name: tensor.clone() for name, tensor in shared.items()}
            self._owned[segment] = True

    def truncate(self, length: int) -> None:
        """Forget the tokens from `length` on (at most what is held)."""
        if length >= self._tail_start:
            self.tail = self.tail[:, :, : length - self._tail_start].clone()
        else:
            self.tail = self.tail[:, :, :0].clone()
            self._tail_start = length
        if length < self.packed:
            begin = length - length % self.codec.group
            # All tokens of the cut group are exact: it is open again, as if never packed.
            self.packed = begin if begin >= self._tail_start else length
            self._clear_slots()

    def _clear_slots(self) -> None:
        kept = -(-self.packed // self.segment_tokens)
        del self.segments[kept:], self._owned[kept:]
        inside = self.packed % self.segment_tokens
        if inside:
            self._own(kept - 1)
            for field in self.codec.fields:
                field.clear_from(self.segments[-1][field.name], inside)

    def clear_sinks(self, sink_positions: Tensor, length: int) -> None:
        """Zero the sink tokens that stand at or behind `length`."""
        if self.sinks is not None:
            row, slot = (sink_positions >= length).nonzero(as_tuple=True)
            self.sinks = self.sinks.clone()
            self.sinks[row, :, slot] = 0

    def fork(self) -> Stream:
        """Return a copy that shares the slots until one side writes."""
        other = object.__new__(Stream)
        other.__dict__.update(self.__dict__)
        other.segments = list(self.segments)
        self._owned = [False] * len(self.segments)
        other._owned = [False] * len(self.segments)
        return other

    def select(self, indices: Tensor) -> Stream:
        """Return a copy with the given batch rows."""
        other = object.__new__(Stream)
        other.__dict__.update(self.__dict__)
        indices = indices.to(self.tail.device)
        other.segments = [
            {name: tensor.index_select(0, indices) for name, tensor in segment.items()}
            for segment in self.segments
        ]
        other._owned = [True] * len(self.segments)
        other.tail = self.tail.index_select(0, indices)
        other.sinks = None if self.sinks is None else self.sinks.index_select(0, indices)
        return other

    def tensors(self) -> list[Tensor]:
        """Return every tensor held."""
        held = [tensor for segment in self.segments for tensor in segment.values()]
        return [*held, self.tail, *([] if self.sinks is None else [self.sinks])]
