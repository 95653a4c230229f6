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

import torch
from torch import Tensor

from kvpact.cache.segments import Segment, SegmentStore
from kvpact.methods import Codec


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
    store : SegmentStore
        Where the slots lie.
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
        store: SegmentStore,
    ) -> None:
        self.codec, self.window = codec, window
        self.store = store
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

    def adopt(self, tokens: int, sinks: Tensor | None) -> None:
        """Begin an empty stream with tokens whose slots are in the store (whole groups)."""
        self.packed = self._tail_start = tokens
        if self.sinks is not None and sinks is not None:
            self.sinks = sinks

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
        start = max(self._tail_start, self._exact_start(packed, length, self.codec.group))
        # A slice would keep the whole of `known` alive behind it.
        tail = (
            known if start == self._tail_start else known[:, :, start - self._tail_start :].clone()
        )
        segments = self.store.missing(packed)
        sinks = self._fill_sinks(x, sink_positions)
        return AppendPlan(pieces, packed, start, tail, sinks, segments)

    def _exact_start(self, packed: int, length: int, group: int = 1) -> int:
        """Where the window begins, or the group that it begins in; never behind `packed`."""
        begin = max(length - self.window, 0)
        return min(packed, begin - begin % group)

    @property
    def exact_from(self) -> int:
        """Tokens from here on are attended exactly: the window and the open group.

        The tail may begin earlier, at the beginning of the window's first group: those tokens are
        there so that a rollback inside the window can open their group again.
        """
        return max(self._tail_start, self._exact_start(self.packed, self.length))

    def exact_tail(self) -> Tensor:
        """Return the tokens from `exact_from` on."""
        return self.tail[:, :, self.exact_from - self._tail_start :]

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
        segment, inside = divmod(token, self.store.segment_tokens)
        index = inside // self.codec.group
        return {
            field.name: field.read(self.store.segment(segment)[field.name])[:, :, index : index + 1]
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
        self.store.extend(plan.segments)
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
                segment, inside = divmod(token, self.store.segment_tokens)
                take = min((self.store.segment_tokens - inside) // unit, values.shape[2] - done)
                self.store.own(segment)
                part = values[:, :, done : done + take]
                field.write(self.store.segment(segment)[field.name], inside, part)
                done += take

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
        segment, inside = divmod(self.packed, self.store.segment_tokens)
        if inside and self.store.own(segment):
            self.clear_segment(segment)
        self.store.keep(segment + bool(inside))

    def clear_segment(self, index: int) -> None:
        """Zero what a segment holds of tokens from `packed` on."""
        inside = max(self.packed - index * self.store.segment_tokens, 0)
        for field in self.codec.fields:
            field.clear_from(self.store.segment(index)[field.name], inside)

    def clear_sinks(self, sink_positions: Tensor, length: int) -> None:
        """Zero the sink tokens that stand at or behind `length`."""
        if self.sinks is not None:
            row, slot = (sink_positions >= length).nonzero(as_tuple=True)
            self.sinks = self.sinks.clone()
            self.sinks[row, :, slot] = 0

    def fork(self, store: SegmentStore | None = None) -> Stream:
        """Return a copy that shares the slots until one side writes (or has another store)."""
        other = object.__new__(Stream)
        other.__dict__.update(self.__dict__)
        other.store = self.store.fork() if store is None else store
        return other

    def select(self, indices: Tensor) -> Stream:
        """Return a copy with the given batch rows."""
        other = object.__new__(Stream)
        other.__dict__.update(self.__dict__)
        indices = indices.to(self.tail.device)
        other.store = self.store.select(indices)
        other.tail = self.tail.index_select(0, indices)
        other.sinks = None if self.sinks is None else self.sinks.index_select(0, indices)
        return other

    def tensors(self) -> list[Tensor]:
        """Return every tensor held."""
        held = [tensor for field in self.codec.fields for tensor in self.store.tensors(field.name)]
        learnt = self.codec.state().values()
        return [*held, *learnt, self.tail, *([] if self.sinks is None else [self.sinks])]
