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

A stream never changes. An append is planned (checked, encoded, allocated), which gives the stream
as it will be; then the new slots are written, behind those that anybody reads; then the layer holds
the new stream. So whatever goes wrong on the way, the stream that the layer holds is right.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from kvpact.cache.append import AppendPlan, Piece
from kvpact.cache.segments import MakeStore, SegmentStore
from kvpact.cache.sinks import filled_sinks, sink_positions
from kvpact.kernels import (
    KnownByPosition,
    Segment,
    StreamPlan,
    TokenMemory,
)
from kvpact.methods import Codec
from kvpact.methods.context import Context, mean_over_tokens

MOST_STEP = 8
"""Appends of so many tokens to what is held leave room behind the tail for the next ones."""
SLACK = 8
"""Tokens of that room."""


class Stream(NamedTuple):
    """Slots and exact tokens of one stream at one moment; an append or a rollback makes another.

    Parameters
    ----------
    codec : Codec
        Encodes and decodes.
    window : int
        Exact tokens at the end.
    plan : StreamPlan
        Who encodes and decodes.
    store : SegmentStore
        Where the slots lie.
    packed : int
        Tokens that have slots.
    memory : TokenMemory
        Where the tail lies, `[B, H, n, D]`; in its dtype, on its device.
    tail_start : int
        Tokens in front of the tail.
    length : int
        Tokens held.
    spare : int
        Tokens that fit behind the tail, into its memory.
    sinks : Tensor or None
        `[B, H, S, D]`, each row's exact first tokens.
    offset : RowOffset, RowRotation or None
        What is taken off tokens before they are encoded; exact tokens are whole.
    """

    codec: Codec
    window: int
    plan: StreamPlan
    store: SegmentStore
    packed: int
    memory: TokenMemory
    tail_start: int
    length: int
    spare: int
    sinks: Tensor | None
    offset: KnownByPosition | None = None

    @classmethod
    def empty(
        cls,
        codec: Codec,
        like: Tensor,
        sinks: int,
        window: int,
        store: SegmentStore,
        plan: StreamPlan,
        offset: KnownByPosition | None = None,
    ) -> Stream:
        """Return a stream for tokens like `[B, H, T, D]` that holds none.

        Parameters
        ----------
        codec : Codec
            Encodes and decodes.
        like : Tensor
            Has the shape, dtype and device of the tokens to come; its tokens are not looked at.
        sinks, window : int
            Exact tokens at the beginning and at the end.
        store : SegmentStore
            Where the slots lie.
        plan : StreamPlan
            Who encodes and decodes.
        offset : RowOffset or RowRotation, optional
            What is taken off tokens before they are encoded.
        """
        batch, heads, _, dim = like.shape
        first = like.new_zeros(batch, heads, sinks, dim) if sinks else None
        memory = TokenMemory(like.new_zeros(batch, heads, 0, dim), 0)
        return cls(codec, window, plan, store, 0, memory, 0, 0, 0, first, offset)

    @property
    def tail(self) -> Tensor:
        """The exact tokens at the end, `[B, H, length - tail_start, D]`."""
        return self.memory.tokens(self.tail_start, self.length)

    def restore(
        self,
        packed: int,
        tail_start: int,
        tail: Tensor,
        sinks: Tensor | None,
        slots: Mapping[str, Tensor] | None = None,
    ) -> Stream:
        """Return an empty stream with what another held.

        Parameters
        ----------
        packed, tail_start : int
            As in `Stream`.
        tail, sinks : Tensor
            The exact tokens.
        slots : mapping, optional
            Field -> `[B, H, units, …]` of the packed tokens, which are copied; they are in the
            store already if omitted.
        """
        store, size = self.store.grown(packed, 0), self.store.segment_tokens
        for field in self.codec.fields if slots else ():
            held, units = (slots or {}).get(field.name), size // field.tokens
            for index in range(-(-packed // size) if held is not None else 0):
                part = held[:, :, index * units : (index + 1) * units]  # type: ignore[index]
                store.segment(index)[field.name][:, :, : part.shape[2]] = part
        return self._replace(store=store, packed=packed, sinks=sinks)._with_tail(tail, tail_start)

    def _with_tail(self, tail: Tensor, start: int) -> Stream:
        """Return the stream with other exact tokens, in memory of their own, from `start` on."""
        memory, length = TokenMemory(tail, start), start + tail.shape[2]
        return self._replace(memory=memory, tail_start=start, length=length, spare=0)

    def prepare(
        self, x: Tensor, padding: Tensor | None, query_energy: Tensor | None = None
    ) -> AppendPlan:
        """Encode tokens and allocate what they need.

        Parameters
        ----------
        x : Tensor
            `[B, H, new, D]`, checked.
        padding : Tensor or None
            `[B]` left-padding tokens of each row.
        query_energy : Tensor, optional
            `[B, H, n, D]` fp32: of the first n queries, the mean square over the query heads of
            each KV head.

        Raises
        ------
        NonFiniteError
            A token that the codec can't hold, be it now or when its group is complete.
        """
        coded = self.coded(x, self.length)
        self.codec.check_range(coded)
        x = x.to(self.memory.tensor.dtype)
        coded = x if self.offset is None else coded
        held = self.length
        length = held + x.shape[2]
        positions, sink_end = self.sink_positions(padding)
        exact = 0 if self.sinks is None else self.sinks.shape[2]
        context = Context(padding, exact)
        plan = self._learnt(x, coded, length, context, query_energy)
        codec = plan.codec
        pieces, packed = self._encode(plan, x, coded, length, context)
        start = max(self.tail_start, self._exact_start(packed, length, self.codec.group))
        memory, spare = self.next_memory(x, start)
        sinks = self.sinks
        if sinks is not None and positions is not None and held < sink_end:
            sinks = filled_sinks(sinks, x, positions - held)
        store = self.store.grown(packed, self.packed)
        window, offset = self.window, self.offset
        after = Stream(
            codec, window, plan, store, packed, memory, start, length, spare, sinks, offset
        )
        return AppendPlan(after, pieces)

    def next_memory(self, x: Tensor, start: int) -> tuple[TokenMemory, int]:
        """Return where the tail from `start` on lies with new tokens, and the room behind them.

        Room is written to at once: no view reaches there.
        """
        new, held, memory = x.shape[2], self.length, self.memory
        length, kept = held + new, max(held - start, 0)
        if kept and self.spare >= new:
            memory.tokens(held, length).copy_(x)
            return memory, self.spare - new
        if start > held:
            x = x[:, :, start - held :]
        if new > MOST_STEP or not held or start == length:
            # A slice would keep the whole of `x` alive behind it.
            tail = torch.cat([memory.tokens(start, held), x], 2) if kept else x.clone()
            return TokenMemory(tail, start), 0
        shape, count = x.shape, length - start
        tail = x.new_zeros(*shape[:2], count + SLACK, shape[3])
        if kept:
            tail[:, :, :kept] = memory.tokens(start, held)
        tail[:, :, kept:count] = x
        return TokenMemory(tail, start), SLACK

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
        return max(self.tail_start, self._exact_start(self.packed, self.length))

    def exact_tail(self) -> Tensor:
        """Return the tokens from `exact_from` on."""
        return self.memory.tokens(self.exact_from, self.length)

    def _learnt(
        self, x: Tensor, coded: Tensor, length: int, context: Context, energy: Tensor | None
    ) -> StreamPlan:
        """Return the plan of a codec that has learnt, if this append brings what it learns from."""
        count = self.codec.learns_from
        if not count or self.codec.ready or length < count:
            return self.plan
        first = self._tokens(x, coded, self.packed, self.packed + count)
        if energy is not None:
            energy = mean_over_tokens(energy, context.counted(energy))
        return self.plan.learnt(first, context._replace(query_energy=energy))

    def _encode(
        self, plan: StreamPlan, x: Tensor, coded: Tensor, length: int, context: Context
    ) -> tuple[list[Piece], int]:
        pieces, packed, group = [], self.packed, self.codec.group
        cut = packed % group
        if cut and packed < length:
            end = min(packed + group - cut, length)
            rest = plan.prepare(self._tokens(x, coded, packed, end), self._group_at(packed))
            pieces.append(Piece(packed, end, *rest))
            packed = end
        end = packed + (length - packed) // group * group if packed % group == 0 else packed
        special = min(-(-context.end // group) * group, end) if group > 1 else 0
        if special > packed:  # groups with sinks or padding
            whole = self._tokens(x, coded, packed, special)
            if packed:
                whole = torch.nn.functional.pad(whole, (0, 0, packed, 0))
            ordinary = context.ordinary(whole, group)[:, :, packed:]
            if not plan.codec.ready:  # it learns from all that it encodes first
                ordinary = torch.cat([ordinary, self._tokens(x, coded, special, end)], 2)
                special = end
            pieces.append(Piece(packed, special, *plan.prepare(ordinary)))
            packed = special
        if end > packed:
            pieces.append(Piece(packed, end, *plan.prepare(self._tokens(x, coded, packed, end))))
        return pieces, max(end, packed)

    def from_origin(self, origin: tuple[int, ...] | None) -> Stream:
        """Return the stream with other tokens at position 0 (see `RowOffset`)."""
        return self._replace(offset=self.offset and self.offset.begun_at(origin))

    def coded(self, x: Tensor, start: int) -> Tensor:
        """Return tokens from `start` on as they are encoded."""
        return x if self.offset is None else self.offset.without(x, start)

    def _tokens(self, x: Tensor, coded: Tensor, start: int, end: int) -> Tensor:
        """Return tokens of the tail, and of the new ones behind it, as they are encoded."""
        held = self.length
        if start >= held:
            return coded if end - start == x.shape[2] else coded[:, :, start - held : end - held]
        known = torch.cat([self.memory.tokens(start, held), x[:, :, : end - held]], 2)
        return self.coded(known[:, :, : end - start], start)

    def _group_at(self, token: int) -> Segment:
        """Side information of the group that a token is in, `[B, H, 1, …]` by field name."""
        segment, inside = divmod(token, self.store.segment_tokens)
        index = inside // self.codec.group
        return {
            field.name: field.read(self.store.segment(segment)[field.name])[:, :, index : index + 1]
            for field in self.codec.fields
            if field.per_group
        }

    def sink_positions(self, padding: Tensor | None) -> tuple[Tensor | None, int]:
        """Return where each row's sink tokens stand, `[B, S]`, and the position behind the last."""
        return (None, 0) if self.sinks is None else sink_positions(self.sinks, padding)

    def truncate(self, length: int, padding: Tensor | None) -> Stream:
        """Return the stream without the tokens from `length` on (at most what is held).

        Their slots are still to be cleared: `store.clear_from(packed)`.

        Parameters
        ----------
        length : int
            Tokens to keep.
        padding : Tensor or None
            `[B]` left-padding tokens of each row.
        """
        positions, _ = self.sink_positions(padding)
        start, packed, sinks = min(self.tail_start, length), self.packed, self.sinks
        tail = self.memory.tokens(start, length).clone()
        if length < packed:
            begin = length - length % self.codec.group
            # All tokens of the cut group are exact: it is open again, as if never packed.
            packed = begin if begin >= start else length
        if sinks is not None and positions is not None:
            row, slot = (positions >= length).nonzero(as_tuple=True)
            sinks = sinks.clone()
            sinks[row, :, slot] = 0
        cut = self._replace(store=self.store.cut(packed), packed=packed, sinks=sinks)
        cut = cut if length else cut.from_origin(None)
        return cut._with_tail(tail, start)

    def shared(self) -> Stream:
        """Return the stream as this side of a fork holds it: it writes nowhere that both read."""
        return self._replace(store=self.store.shared(), spare=0)

    def fork(self, make_store: MakeStore | None = None, side: str = "") -> Stream:
        """Return the other side of a fork, with slots in a store of that making if it is given."""
        store = self.store.shared()
        if make_store is not None:
            like = self.memory.tensor
            batch, heads = like.shape[:2]
            store = make_store(self.codec, batch, heads, like.device, side)
        return self._replace(store=store, spare=0, plan=self.plan.fork())

    def select(self, indices: Tensor) -> Stream:
        """Return a copy with the given batch rows."""
        indices = indices.to(self.memory.tensor.device)
        rows = self._replace(
            store=self.store.select(indices),
            plan=self.plan.fork(),
            sinks=None if self.sinks is None else self.sinks.index_select(0, indices),
            offset=None if self.offset is None else self.offset.select(indices),
        )
        return rows._with_tail(self.tail.index_select(0, indices), self.tail_start)

    @property
    def room(self) -> int:
        """Bytes of the tail's memory that lie unused around it."""
        return self.tail_memory().nbytes - self.tail.nbytes

    def tail_memory(self) -> Tensor:
        """Return the memory of the tail, with the room in it."""
        tail, held = self.memory.tensor, self.tail
        count = tail.untyped_storage().nbytes() // tail.itemsize
        return held if count == held.numel() else tail.as_strided((count,), (1,), 0)

    def held_parts(self) -> tuple[object, ...]:
        """Return the fields with the tail in the place of its memory, room and all."""
        return tuple(self.tail if part is self.memory else part for part in self)

    def tensors(self) -> list[Tensor]:
        """Return every tensor held."""
        held = [tensor for field in self.codec.fields for tensor in self.store.tensors(field.name)]
        learnt = self.codec.state().values()
        return [*held, *learnt, self.tail_memory(), *([] if self.sinks is None else [self.sinks])]

    def __repr__(self) -> str:
        """Tell how many tokens are held, and how."""
        batch, heads, _, dim = self.memory.tensor.shape
        sinks = 0 if self.sinks is None else self.sinks.shape[2]
        return (
            f"Stream({type(self.codec).__name__}, batch={batch}, heads={heads}, dim={dim}, "
            f"length={self.length}, packed={self.packed}, "
            f"tail={self.tail_start}:{self.length}, exact_from={self.exact_from}, "
            f"spare={self.spare}, sinks={sinks}, window={self.window})"
        )
