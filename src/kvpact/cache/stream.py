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

from typing import Any, NamedTuple

import torch
from torch import Tensor

from kvpact.cache.segments import SegmentStore
from kvpact.kernels import Segment, StreamPlan
from kvpact.kernels.base import Encoder
from kvpact.methods import Codec

MOST_STEP = 8
"""Appends of so many tokens to what is held leave room behind the tail for the next ones."""
SLACK = 8
"""Tokens of that room."""


class _Piece(NamedTuple):
    """Whole groups (or the rest of one), prepared by an encoder, and the tokens they are."""

    start: int
    end: int
    encoder: Encoder
    prepared: Any


class AppendPlan(NamedTuple):
    """All that an append will change; made without changing anything."""

    pieces: list[_Piece]
    packed: int
    tail_start: int
    tail: Tensor
    room: int
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
    plan : StreamPlan
        Who encodes and decodes.
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
        plan: StreamPlan,
    ) -> None:
        self.codec, self.window, self.plan = codec, window, plan
        self.store = store
        self._room = 0  # tokens that fit behind the tail, into its memory
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

    def take_over(self, packed: int, start: int, tail: Tensor, sinks: Tensor | None) -> None:
        """Hold what another stream held; its slots are in the store already."""
        self.packed, self._tail_start = packed, start
        self.tail, self.sinks, self._room = tail, sinks, 0

    def prepare(self, x: Tensor, sink_positions: Tensor | None, sink_end: int) -> AppendPlan:
        """Encode tokens and allocate what they need; the stream stays as it is.

        Parameters
        ----------
        x : Tensor
            `[B, H, new, D]`, checked.
        sink_positions : Tensor or None
            `[B, S]`: where each row's sink tokens stand.
        sink_end : int
            No sink token stands at or behind this position.

        Raises
        ------
        NonFiniteError
            A token that the codec can't hold, be it now or when its group is complete.
        """
        self.codec.check_range(x)
        x = x.to(self.tail.dtype)
        held = self.length
        length = held + x.shape[2]
        pieces, packed = self._encode(x, length)
        start = max(self._tail_start, self._exact_start(packed, length, self.codec.group))
        tail, room = self._next_tail(x, start)
        segments = self.store.missing(packed)
        sinks = self.sinks
        if held < sink_end:
            sinks = self._fill_sinks(x, sink_positions)
        return AppendPlan(pieces, packed, start, tail, room, sinks, segments)

    def _next_tail(self, x: Tensor, start: int) -> tuple[Tensor, int]:
        """Return the tail from `start` on with new tokens behind it, and the room left behind them.

        Room is written to at once: no view reaches there.
        """
        new, first = x.shape[2], start - self._tail_start
        held = self.tail.shape[2]
        kept = held - first
        if kept < 0:
            x, kept, new = x[:, :, -kept:], 0, new + kept
        shape, strides = x.shape, self.tail.stride()
        if kept and self._room >= new:
            offset = self.tail.storage_offset()
            behind = (*shape[:2], new, shape[3])
            self.tail.as_strided(behind, strides, offset + held * strides[2]).copy_(x)
            both = (*shape[:2], kept + new, shape[3])
            tail = self.tail.as_strided(both, strides, offset + first * strides[2])
            return tail, self._room - new
        old = self.tail[:, :, first:]
        if new > MOST_STEP or not self.length or kept + new == 0:
            # A slice would keep the whole of `x` alive behind it.
            return (torch.cat([old, x], 2) if kept else x.clone()), 0
        tail = x.new_zeros(*shape[:2], kept + new + SLACK, shape[3])
        tail[:, :, :kept] = old
        tail[:, :, kept : kept + new] = x
        return tail[:, :, : kept + new], SLACK

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
        first = self.exact_from - self._tail_start
        return self.tail[:, :, first:] if first else self.tail

    def _encode(self, x: Tensor, length: int) -> tuple[list[_Piece], int]:
        pieces, packed, group = [], self.packed, self.codec.group
        cut = packed % group
        if cut and packed < length:
            end = min(packed + group - cut, length)
            tokens = self._tokens(x, packed, end)
            rest = self.plan.prepare(tokens, self._group_at(packed))
            pieces.append(_Piece(packed, end, *rest))
            packed = end
        end = packed + (length - packed) // group * group if packed % group == 0 else packed
        if end > packed:
            tokens = self._tokens(x, packed, end)
            pieces.append(_Piece(packed, end, *self.plan.prepare(tokens)))
        return pieces, max(end, packed)

    def _tokens(self, x: Tensor, start: int, end: int) -> Tensor:
        """Return tokens of the tail, and of the new ones behind it."""
        held = self.length
        if start >= held:
            return x if end - start == x.shape[2] else x[:, :, start - held : end - held]
        known = torch.cat([self.tail[:, :, start - self._tail_start :], x[:, :, : end - held]], 2)
        return known[:, :, : end - start]

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
        self.tail, self._room, self.sinks = plan.tail, plan.room, plan.sinks

    def _write(self, piece: _Piece) -> None:
        size = self.store.segment_tokens
        first = piece.start // size
        indices = range(first, -(-piece.end // size))
        for index in indices:
            self.store.own(index)
        segments = [self.store.segment(index) for index in indices]
        piece.encoder.write(piece.prepared, segments, size, piece.start - first * size)

    def truncate(self, length: int) -> None:
        """Forget the tokens from `length` on (at most what is held)."""
        self._room = 0
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
        self._room = 0  # nobody writes behind a tail that two share
        other = object.__new__(Stream)
        other.__dict__.update(self.__dict__)
        other.plan = self.plan.fork()
        other.store = self.store.fork() if store is None else store
        return other

    def select(self, indices: Tensor) -> Stream:
        """Return a copy with the given batch rows."""
        other = object.__new__(Stream)
        other.__dict__.update(self.__dict__)
        other._room, other.plan = 0, self.plan.fork()
        indices = indices.to(self.tail.device)
        other.store = self.store.select(indices)
        other.tail = self.tail.index_select(0, indices)
        other.sinks = None if self.sinks is None else self.sinks.index_select(0, indices)
        return other

    @property
    def room(self) -> int:
        """Bytes of the tail's memory that lie unused around it."""
        return self.tail_memory().nbytes - self.tail.nbytes

    def tail_memory(self) -> Tensor:
        """Return the memory of the tail, with the room in it."""
        count = self.tail.untyped_storage().nbytes() // self.tail.element_size()
        return self.tail if count == self.tail.numel() else self.tail.as_strided((count,), (1,), 0)

    def tensors(self) -> list[Tensor]:
        """Return every tensor held."""
        held = [tensor for field in self.codec.fields for tensor in self.store.tensors(field.name)]
        learnt = self.codec.state().values()
        return [*held, *learnt, self.tail_memory(), *([] if self.sinks is None else [self.sinks])]
