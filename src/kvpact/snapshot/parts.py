"""Rows and slices of plain state."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from kvpact.errors import GeometryError, MismatchError
from kvpact.key_offset import same_offset
from kvpact.snapshot.state import LayerState, StreamState
from kvpact.snapshot.tensors import same_tensors


def select_rows(state: LayerState, rows: Sequence[int]) -> LayerState:
    """Return a layer's state with these rows of the batch, in this order."""
    if state.streams is None:
        return state
    batch = state.streams[0].tail.shape[0]
    if not rows or any(type(row) is not int or not 0 <= row < batch for row in rows):
        raise GeometryError(f"rows should be some of 0 ... {batch - 1}, not {list(rows)!r}")
    index = torch.tensor(list(rows), dtype=torch.int64, device="cpu")

    def pick(x: Tensor) -> Tensor:
        return x.index_select(0, index.to(x.device))

    k, v = (
        replace(
            stream,
            slots={name: pick(x) for name, x in stream.slots.items()},
            tail=pick(stream.tail),
            sinks=None if stream.sinks is None else pick(stream.sinks),
            origin=_trimmed(stream.origin and tuple(stream.origin[row] for row in rows)),
            query_energy=None if stream.query_energy is None else pick(stream.query_energy),
        )
        for stream in state.streams
    )
    padding = None if state.padding is None else tuple(state.padding[row] for row in rows)
    return LayerState(state.spec, (k, v), _trimmed(padding))


def _trimmed(padding: tuple[int, ...] | None) -> tuple[int, ...] | None:
    """Return None where no row has padding: that is how caches hold it."""
    return padding if padding is not None and any(padding) else None


def stack_rows(states: Sequence[LayerState]) -> LayerState:
    """Return the states of one layer as the rows of one state. Raises `GeometryError`."""
    if len(states) == 1:
        return states[0]
    if not states or len({state.streams is None for state in states}) > 1:
        raise GeometryError("some of the sequences hold nothing; snapshot the others alone")
    if states[0].streams is None:
        return states[0]
    sides = zip(*(state.streams or () for state in states), strict=True)
    k, v = (_stacked(list(side)) for side in sides)
    rows = [n for s in states for n in (s.padding or (0,) * s.streams[0].tail.shape[0])]  # type: ignore[index]
    return LayerState(states[0].spec, (k, v), _trimmed(tuple(rows)))


def _stacked(streams: Sequence[StreamState]) -> StreamState:
    first = streams[0]
    if len({(s.packed, s.start, s.length) for s in streams}) > 1:
        raise GeometryError(
            f"sequences of {', '.join(str(s.length) for s in streams)} tokens, or cut at unlike "
            "places, are no rows of one snapshot; take one of each"
        )
    if not all(same_tensors(first.learnt, other.learnt) for other in streams[1:]):
        raise MismatchError("the sequences' methods have learnt unlike things")
    if not all(same_offset(first.offset, other.offset) for other in streams[1:]):
        raise MismatchError("the sequences' keys are stored without unlike offsets")
    energies = [s.query_energy for s in streams if s.query_energy is not None]
    if len(energies) not in (0, len(streams)) or len({x.shape[2] for x in energies}) > 1:
        raise GeometryError("the sequences have seen unlike numbers of queries; take one of each")
    sinks = [s.sinks for s in streams if s.sinks is not None]
    rows = [n for s in streams for n in s.origin or (0,) * s.tail.shape[0]]
    return replace(
        first,
        slots={name: torch.cat([s.slots[name] for s in streams]) for name in first.slots},
        tail=torch.cat([s.tail for s in streams]),
        sinks=torch.cat(sinks) if sinks else None,
        query_energy=torch.cat(energies) if energies else None,
        origin=_trimmed(tuple(rows)),
    )


def cut(state: LayerState, end: int) -> LayerState:
    """Return a layer's state that ends after `end` packed tokens, with nothing in the tail."""
    if state.streams is None:
        return state
    batch = state.streams[0].tail.shape[0]
    first = torch.tensor(state.padding or (0,) * batch, dtype=torch.int64, device="cpu")
    streams = []
    for stream in state.streams:
        sinks = stream.sinks
        if sinks is not None:
            places = torch.arange(sinks.shape[2], dtype=torch.int64, device="cpu")
            after = first.unsqueeze(1) + places >= end
            sinks = sinks.masked_fill(after[:, None, :, None], 0)
        # Packed tokens are those of a codec that has learnt.
        held = replace(stream, packed=end, start=end, sinks=sinks, query_energy=None)
        streams.append(replace(held, tail=stream.tail[:, :, :0]))
    return replace(state, streams=(streams[0], streams[1]))


def joined(states: Sequence[LayerState]) -> LayerState:
    """Return the state of one layer's parts; the last one's end is the whole's."""
    last = states[-1]
    kinds = [(state.spec, state.padding, state.streams is None) for state in states]
    if any(kind != kinds[-1] for kind in kinds):
        raise MismatchError("the parts of a layer are of unlike specs or paddings")
    if last.streams is None:
        return last
    streams = []
    for index in range(2):
        parts = [state.streams[index] for state in states if state.streams is not None]
        end = parts[-1]
        for part in parts:
            if part.fields != end.fields or not same_tensors(part.learnt, end.learnt):
                raise MismatchError("the parts' methods have learnt unlike things")
            if not same_offset(part.offset, end.offset) or part.origin != end.origin:
                raise MismatchError("the parts' keys are stored without unlike offsets")
        slots = {name: torch.cat([part.slots[name] for part in parts], 2) for name in end.slots}
        streams.append(replace(end, slots=slots))
    return replace(last, streams=(streams[0], streams[1]))
