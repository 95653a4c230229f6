"""A stream: K or V of one layer, as packed slots and exact tokens, an immutable value.

ARCHITECTURE.md ("What is stored") says what is where, and when; `kvpact.testing.StreamOracle`
defines it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kvpact.cache.stream.advance import SLACK, Advance, advance, next_memory
from kvpact.cache.stream.energies import mean_energy
from kvpact.cache.stream.segments import MakeStore, SegmentStore
from kvpact.cache.stream.sinks import filled_sinks, sink_positions, sinks_among
from kvpact.kernels import (
    WAITING,
    Encoder,
    KnownByPosition,
    Segment,
    StreamPlan,
    StreamView,
    TokenMemory,
)
from kvpact.kernels.finite import check_arrival
from kvpact.methods import Codec
from kvpact.methods.context import Context
from kvpact.units import FEW, learning, unit_of

PIECE = 64
"""Tokens in fp32 that are decompressed at a time; in 16 bits there are twice as many."""


class Piece(NamedTuple):
    """Whole groups (or the rest of one), prepared by an encoder, and the tokens they are."""

    start: int
    end: int
    encoder: Encoder
    prepared: Any


class Stream(NamedTuple):
    """Slots and exact tokens of one stream at one moment; an append or a rollback makes another.

    - `packed`: tokens that have slots; the tail begins there (`tail_start`) or before.
    - `memory`: where the tail lies, `[B, H, n, D]`, with room for `spare` more tokens.
    - `sinks`: `[B, H, S, D]`, each row's exact first tokens; None while the tail has all tokens.
    - `offset`: what is taken off tokens before they are encoded; exact tokens are whole.
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
    num_sinks: int
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
    ) -> Stream:
        """Return a stream for tokens like `[B, H, T, D]` that holds none."""
        batch, heads, _, dim = like.shape
        memory = TokenMemory(like.new_zeros(batch, heads, 0, dim), 0)
        return cls(codec, window, plan, store, 0, memory, 0, 0, 0, None, sinks)

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
        """Return an empty stream with what another held; `slots` may be in the store already."""
        store = self.store.grown(packed, 0)
        for field in self.codec.fields if slots and packed else ():
            if (held := (slots or {}).get(field.name)) is not None:
                units = store.segment_tokens // field.tokens
                most = -(-packed // store.segment_tokens) * units
                store.write(field.name, held[:, :, :most], units)
        return self._replace(store=store, packed=packed, sinks=sinks)._with_tail(tail, tail_start)

    def _with_tail(self, tail: Tensor, start: int) -> Stream:
        """Return the stream with other exact tokens, in memory of their own, from `start` on."""
        memory, length = TokenMemory(tail, start), start + tail.shape[2]
        return self._replace(memory=memory, tail_start=start, length=length, spare=0)

    def prepare(
        self, x: Tensor, padding: Tensor | None, seen: Tensor | None, size: float | None = None
    ) -> AppendPlan:
        """Encode tokens `[B, H, new, D]`, checked, and allocate what they need; see `Held.seen`."""
        given, x = x, x.to(self.memory.tensor.dtype)
        coded = x if self.offset is None else self.coded(given, self.length)
        held, codec, plan = self.length, self.codec, self.plan
        context, now = Context(padding, self.num_sinks), self.advanced(x.shape[2])
        if now.packed and not codec.ready:
            plan = self._learnt(x, coded, now.packed, context, seen)
            codec = plan.codec
        size = size if self.offset is None else None
        check_arrival(plan, coded, max(now.packed - held, 0), size)
        # What waited may be larger: only where nothing did is that the size of what is encoded.
        pieces = self._encode(plan, x, coded, now.packed, context, None if held else size)
        memory = next_memory(self.memory, held, x, now)
        sinks = self._next_sinks(x, now.tail, padding)
        # What a codec stores may depend on what it has learnt.
        store = self.store if plan is self.plan else self.store.made_for(codec)
        store = store.grown(now.packed, self.packed)
        packed, start, length, spare, _ = now
        window, count, offset = self.window, self.num_sinks, self.offset
        after = Stream(
            codec, window, plan, store, packed, memory, start, length, spare, sinks, count, offset
        )
        return AppendPlan(after, pieces)

    def advanced(self, new: int) -> Advance:
        """Return the counts after so many new tokens."""
        codec, window = self.codec, self.window
        unit, learns_from = unit_of(codec.group, window), 0 if codec.ready else codec.learns_from
        held, spare = self.length, self.spare
        return advance(self.packed, self.tail_start, held, spare, new, unit, window, learns_from)

    def reserved(self, tokens: int) -> Stream:
        """Return the stream with room for so many more tokens; its tail then stays where it is."""
        store, held, room = self.store, self.length, tokens + SLACK
        store = store.grown(self.advanced(tokens).packed, self.packed)
        if not tokens or self.tail_start == held or self.spare >= room:
            return self._replace(store=store)
        now = Advance(self.packed, self.tail_start, held, room, False)
        memory = next_memory(self.memory, held, self.memory.tensor[:, :, :0], now)
        return self._replace(store=store, memory=memory, spare=room)

    def decoded(self, start: int, end: int, padding: Tensor | None) -> Tensor:
        """Return tokens `start <= t < end`, decompressed."""
        view = self.view(padding, lambda: None)
        batch, heads, _, dim = view.tail.shape
        whole, exact = view.tail.new_empty(batch, heads, end - start, dim), view.exact_from
        if start < exact:
            stop = min(end, exact)
            self.plan.decode(view, start, stop, whole[:, :, : stop - start])
        if end > exact:
            first = max(start, exact)
            whole[:, :, first - start :] = view.tail[:, :, first - exact : end - exact]
        return whole

    def sealed(self, tokens: int, padding: Tensor | None) -> AppendPlan:
        """Pack tokens up to a whole group, `tokens`, although the tail has them, and keeps them."""
        none, context = self.memory.tensor[:, :, :0], Context(padding, self.num_sinks)
        pieces = self._encode(self.plan, none, none, tokens, context)
        packed = max(self.packed, tokens)
        store = self.store.grown(packed, self.packed)
        return AppendPlan(self._replace(store=store, packed=packed), pieces)

    def _learnt(
        self, x: Tensor, coded: Tensor, out: int, context: Context, seen: Tensor | None
    ) -> StreamPlan:
        """Return the plan of a codec that has learnt; this append brings what it learns from."""
        first = self._tokens(x, coded, 0, self.codec.learns_from or out)
        if seen is not None and seen.shape[2]:
            energy = mean_energy(seen, self.learning[0], context)
            context = context._replace(query_energy=energy)
        return self.plan.learnt(first, context)

    def _encode(
        self,
        plan: StreamPlan,
        x: Tensor,
        coded: Tensor,
        end: int,
        context: Context,
        size: float | None = None,
    ) -> list[Piece]:
        """Encode what has no slots yet of the tokens in front of `end`."""
        pieces: list[Piece] = []
        packed, group = self.packed, self.codec.group
        cut = packed % group
        if cut and packed < end:
            begin, packed = packed, packed + group - cut
            rest = self._tokens(x, coded, begin, packed)
            encoder, prepared = plan.prepare(rest, self._group_at(begin))
            pieces.append(Piece(begin, packed, encoder, prepared))
        special = min(-(-context.end // group) * group, end) if group > 1 else 0
        if special > packed:  # groups with sinks or padding
            whole = self._tokens(x, coded, packed, special)
            if packed:
                whole = torch.nn.functional.pad(whole, (0, 0, packed, 0))
            ordinary = context.ordinary(whole, group)[:, :, packed:]
            if special < end <= FEW:  # a copy takes less time than a call
                ordinary = torch.cat([ordinary, self._tokens(x, coded, special, end)], 2)
                special = end
            pieces.append(Piece(packed, special, *plan.prepare(ordinary, size=size)))
            packed = special
        if end > packed:
            encoder, prepared = plan.prepare(self._tokens(x, coded, packed, end), size=size)
            pieces.append(Piece(packed, end, encoder, prepared))
        return pieces

    @property
    def learning(self) -> tuple[int, int]:
        """The first token whose queries the codec learns from, and how many are held then."""
        return learning(self.codec.learns_from, self.codec.group, self.window)

    def room_before(self, token: int) -> int:
        """Return how many new tokens there may be before slots from `token` on are written."""
        unit, end = unit_of(self.codec.group, self.window), max(token, self.packed)
        return (end // unit + 1) * unit - 1 + self.window - self.length

    def from_origin(self, origin: tuple[int, ...] | None) -> Stream:
        """Return the stream with other tokens at position 0 (see `RowOffset`)."""
        return self._replace(offset=self.offset and self.offset.begun_at(origin))

    def coded(self, x: Tensor, start: int) -> Tensor:
        """Return tokens from `start` on as they are encoded."""
        return x if self.offset is None else self.offset.without(x, start)

    def _tokens(self, x: Tensor, coded: Tensor, start: int, end: int) -> Tensor:
        """Return tokens of the tail, and of the new ones after it, as they are encoded."""
        held = self.length
        if start >= held:
            return coded if end - start == x.shape[2] else coded[:, :, start - held : end - held]
        known = torch.cat([self.memory.tokens(start, held), x[:, :, : end - held]], 2)
        return self.coded(known[:, :, : end - start], start)

    def _group_at(self, token: int) -> Segment:
        """Side information of the group that a token is in, `[B, H, 1, …]` by field name."""
        index, inside = divmod(token, self.store.segment_tokens)
        group, segment = inside // self.codec.group, self.store.source().segment(index)
        return {
            field.name: field.read(segment[field.name])[:, :, group : group + 1]
            for field in self.codec.fields
            if field.per_group
        }

    def sink_positions(self, padding: Tensor | None) -> tuple[Tensor, int]:
        """Return where each row's sink tokens stand, `[B, S]`, and the position after the last."""
        tail = self.memory.tensor
        return sink_positions(tail.shape[0], self.num_sinks, tail.device, padding)

    def _next_sinks(self, x: Tensor, start: int, padding: Tensor | None) -> Tensor | None:
        """Return the sinks once the tail begins at `start`, after new tokens."""
        if not start or not self.num_sinks:
            return self.sinks
        if self.sinks is None:
            whole = padding is None and not self.length and x.shape[2] >= self.num_sinks
            return x[:, :, : self.num_sinks].clone() if whole else self.first_tokens(padding, x)
        positions, end = self.sink_positions(padding)
        if self.length >= end:
            return self.sinks
        return filled_sinks(self.sinks, x, positions - self.length)

    def first_tokens(self, padding: Tensor | None, x: Tensor | None = None) -> Tensor | None:
        """Return the sinks, also while the tail has them, or new tokens `x` after it."""
        if self.sinks is not None or not self.num_sinks:
            return self.sinks
        positions, end = self.sink_positions(padding)
        known = self.tail[:, :, :end]
        if x is not None and self.length < end:
            known = torch.cat([known, x[:, :, : end - self.length]], 2)
        whole = padding is None and known.shape[2] == end
        return known.clone() if whole else sinks_among(known, positions)

    def view(self, padding: Tensor | None, check: Callable[[], None]) -> StreamView:
        """Return what attention sees; `check` raises once the slots lie there no more."""
        positions, end = (None, 0) if self.sinks is None else self.sink_positions(padding)
        start, window = self.tail_start, WAITING if self.window else 0
        codec, source, tail, sinks = self.codec, self.store.source(), self.tail, self.sinks
        return StreamView(
            codec, source, start, tail, sinks, positions, end, check, self.offset, window
        )

    def truncate(self, length: int, padding: Tensor | None) -> Stream:
        """Return the stream without the tokens from `length` on; their slots are to be cleared."""
        start, packed, sinks = min(self.tail_start, length), self.packed, self.sinks
        tail = self.memory.tokens(start, length).clone()
        if length < packed:
            begin = length - length % self.codec.group
            # All tokens of the cut group are exact: it is open again, as if never packed.
            packed = begin if begin >= start else length
        if sinks is not None:
            row, slot = (self.sink_positions(padding)[0] >= length).nonzero(as_tuple=True)
            sinks = sinks.clone()
            sinks[row, :, slot] = 0
        sinks = sinks if start else None
        cut = self._replace(store=self.store.cut(packed), packed=packed, sinks=sinks)
        cut = cut if length else cut.from_origin(None)
        return cut._with_tail(tail, start)

    def without_first(self, first: int, size: int) -> Stream:
        """Return a stream without sinks as it is without its first tokens, segments of `size`."""
        offset = self.offset
        if offset is not None:
            origin = offset.origin or (0,) * self.memory.tensor.shape[0]
            offset = offset.begun_at(tuple(token - first for token in origin))
        return self._replace(
            store=self.store.without_first(first, size).cut(self.packed - first),
            packed=self.packed - first,
            memory=TokenMemory(self.memory.tensor, self.memory.start - first),
            tail_start=self.tail_start - first,
            length=self.length - first,
            offset=offset,
        )

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
        )
        if self.offset is not None and (origin := self.offset.origin) is not None:
            rows = rows.from_origin(tuple(origin[row] for row in indices.tolist()))
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
        """Describe how many tokens are held, and how."""
        batch, heads, _, dim = self.memory.tensor.shape
        return (
            f"Stream({type(self.codec).__name__}, batch={batch}, heads={heads}, dim={dim}, "
            f"length={self.length}, packed={self.packed}, "
            f"tail={self.tail_start}:{self.length}, spare={self.spare}, "
            f"sinks={self.num_sinks}, window={self.window})"
        )


class AppendPlan(NamedTuple):
    """An append that changed nothing yet: the stream as it will be, and what its slots lack."""

    after: Stream
    pieces: list[Piece]

    def write(self) -> Stream:
        """Write the new slots, after all that is held now; some may be written if it raises."""
        if self.pieces:
            source = self.after.store.source()
            for piece in self.pieces:
                piece.encoder.write(piece.prepared, source, piece.start)
        return self.after
