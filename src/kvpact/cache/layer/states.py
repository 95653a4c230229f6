"""Caches as plain state and back: slots as they lie, exact tokens, what codecs learnt."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import lcm
from typing import Any

import torch
from torch import Tensor

from kvpact.cache.checks import check_fits
from kvpact.cache.layer.layer import CacheLayer
from kvpact.cache.stream.codecs import Calibration, codecs_of
from kvpact.cache.stream.energies import E5M2
from kvpact.cache.stream.stream import Stream
from kvpact.errors import (
    DtypeError,
    FormatError,
    GeometryError,
    MismatchError,
    NonFiniteError,
    SpecError,
)
from kvpact.formats import TILE, Field
from kvpact.geometry import CacheGeometry
from kvpact.kernels import RowRotation
from kvpact.key_offset import same_offset
from kvpact.methods import Codec
from kvpact.methods.fitted import FittedCodec
from kvpact.methods.scaled import NAME, ScaledCodec, scaled_as
from kvpact.snapshot import FieldInfo, LayerState, Snapshot, StreamState
from kvpact.snapshot.tensors import same_tensors
from kvpact.spec import Spec
from kvpact.units import out_of_window

PAGE_TOKENS = 64
"""Least tokens per page of a snapshot: smaller pages cost checksums, larger ones empty slots."""


def page_tokens(
    specs: Sequence[Spec], geometry: CacheGeometry, given: int | None, name: str = "page_size"
) -> int:
    """Return a page's tokens, whole tiles and groups, 64 at least. Raises `GeometryError`."""
    codecs = (x for spec in set(specs) for x in codecs_of(spec, geometry, torch.float32))
    least = lcm(TILE, *(codec.group for codec in codecs))
    size = lcm(PAGE_TOKENS, least) if given is None else given
    if type(size) is not int or size < 1 or size % least:
        raise GeometryError(f"{name} should be a multiple of {least} tokens, not {given!r}")
    return size


def field_info(field: Field) -> FieldInfo:
    """Return what a snapshot says of a field."""
    return FieldInfo(field.name, field.dtype, tuple(field.shape), field.tokens)


def stream_state(stream: Stream) -> StreamState:
    """Return a stream's state; the slots of one segment, and of several, are copies."""
    fields, slots = _slots(stream, 0, stream.packed)
    for field in stream.codec.fields if slots else ():
        if stream.packed <= stream.store.segment_tokens:  # more segments are joined, which copies
            slots[field.name] = slots[field.name].clone()
        # A page that is shared may hold tokens of another sequence after this one's.
        field.clear_from(slots[field.name], stream.packed)
    learnt, offset, start = stream.codec.state(), stream.offset, stream.tail_start
    state = StreamState(fields, slots, stream.packed, start, stream.tail, stream.sinks, learnt)
    if offset is None or offset.offset is None:
        return state  # a rotation is a part of what was learnt
    return replace(state, offset=offset.offset, origin=offset.origin)


def _slots(
    stream: Stream, first: int, last: int
) -> tuple[tuple[FieldInfo, ...], dict[str, Tensor]]:
    """Return the fields of a stream, and the units that hold the tokens `first <= t < last`."""
    source, step, slots = stream.store.source(), stream.store.segment_tokens, {}
    for field in stream.codec.fields if last else ():
        held, unit = source.gather(field.name, first // step, -(-last // step)), field.tokens
        before = first // step * step
        slots[field.name] = held[:, :, (first - before) // unit : -((before - last) // unit)]
    return tuple(field_info(field) for field in stream.codec.fields), slots


def layer_state(layer: CacheLayer) -> LayerState:
    """Return a layer's state, which does not change when the layer does."""
    with layer.lock:
        layer.verify()
        spec, padding = layer.spec.to_json(), layer.padding
        if layer.k is None or layer.v is None:
            return LayerState(spec, None, None)
        rows = None if padding is None else tuple(padding.tolist())
        # Files have sinks also while the tail has all tokens, as they always had.
        k, v = (
            replace(stream_state(stream), sinks=stream.first_tokens(padding))
            for stream in (layer.k, layer.v)
        )
        seen = layer._held.seen
        if seen is not None and seen.shape[2]:
            k = replace(k, query_energy=seen)
        return LayerState(spec, (k, v), rows)


def packed_part(layer: CacheLayer, spec: dict[str, Any], first: int, last: int) -> LayerState:
    """Return the tokens `first <= t < last` of a layer, all packed: slots and sinks."""
    with layer.lock:
        k, v = (_packed_part(stream, first, last) for stream in layer.streams())
        return LayerState(spec, (k, v), None)


def _packed_part(stream: Stream, first: int, last: int) -> StreamState:
    if isinstance(stream.codec, ScaledCodec):
        raise MismatchError(
            "the numbers of a layer are so small that they are stored times a power of two of this "
            "cache, which stored prefixes don't have: keep this layer at 'none'"
        )
    fields, slots = _slots(stream, first, last)
    sinks = stream.first_tokens(None)
    sinks = None if sinks is None or sinks.shape[2] <= first else sinks[:, :, first:last]
    return StreamState(fields, slots, last, last, stream.tail[:, :, :0], sinks, {})


def _check_spec(index: int, state: LayerState, spec: Spec, dtype: torch.dtype | None) -> None:
    """Raise a named error unless a layer's state is of this spec, and of this dtype."""
    if state.spec != spec.to_json():
        found = str(Spec.from_json(state.spec))
        raise SpecError(f"layer {index} of the snapshot is of {found!r}, not {str(spec)!r}")
    given = dtype if state.streams is None else state.streams[0].tail.dtype
    if dtype is not None and given != dtype:
        raise DtypeError(f"the snapshot's tokens are {given}, the cache's {dtype}")


def restored_layer(
    empty: CacheLayer,
    state: LayerState,
    device: torch.device,
    shared: bool,
    index: int = 0,
    dtype: torch.dtype | None = None,
) -> CacheLayer:
    """Fill an empty layer with a state of its spec; `shared` codecs must have learnt the same."""
    _check_spec(index, state, empty.spec, dtype)
    if state.streams is None:
        return empty
    streams = []
    for key, held in zip((True, False), state.streams, strict=True):
        method = empty.spec.key if key else empty.spec.value
        # First of all: whatever has no tokens may claim any number of rows.
        _need((0 if held.sinks is None else held.sinks.shape[2]) == method.sinks, "number of sinks")
        x = held.tail[:, :, :0].to(device)
        codec = empty.new_stream(x, key).codec
        if shared and not learnt_alike(codec, held):
            raise MismatchError(
                "the snapshot's method learnt from other tokens than this cache's; make the cache "
                "with calibration=snapshot, or calibrate both with the same tokens"
            )
        codec = fitted_codec(codec, held, device)
        stream = empty.new_stream(x, key, codec)
        origin = held.origin
        if isinstance(stream.offset, RowRotation):
            origin = state.padding
        if origin is not None:
            stream = stream.from_origin(origin)
        if not same_offset(held.offset, stream.offset and stream.offset.offset):
            raise MismatchError(
                "the snapshot's keys are stored without another key offset than this cache's: make "
                "the cache with the key_offsets of the model that the snapshot is of"
            )
        check_stream(codec, held, method.window, stream.coded(held.tail, held.start))
        exact = None if held.sinks is None or not held.start else held.sinks.to(device)
        tail = held.tail.to(device)
        streams.append(stream.restore(held.packed, held.start, tail, exact, held.slots))
    given = state.padding
    padding = None if given is None else torch.tensor(given, dtype=torch.int64, device="cpu")
    seen = _seen(empty.learner(streams[0], padding), state.streams[0], device)
    empty.restore(empty._held._replace(k=streams[0], v=streams[1], padding=padding, seen=seen))
    return empty


def _seen(stream: Stream, keys: StreamState, device: torch.device) -> Tensor | None:
    """Return the energies of queries that a codec is to learn from, None if it has learnt."""
    energy, codec = keys.query_energy, stream.codec
    if energy is None:
        return None
    _need(not keys.learnt, "energies of queries along with what was learnt from them")
    first, last = stream.learning
    most = min(keys.length, last) - first if codec.learns_from else 0
    _need(energy.shape[2] <= most, "energies of queries that nothing learns from")
    each = energy.view(E5M2).to(torch.float32)
    _need(bool((each >= 0).all() and each.isfinite().all()), "energies of queries")
    return None if codec.ready else energy.to(device)


def check_stream(
    codec: Codec, state: StreamState, window: int, coded: Tensor | None = None
) -> None:
    """Raise `FormatError` unless a cache could have had this state; `coded`: the tail encoded."""
    exact = [state.tail] if state.sinks is None else [state.tail, state.sinks]
    finite = all(bool(torch.isfinite(tensor).all()) for tensor in exact)
    _need(finite, "exact tokens that are not finite")
    try:
        # They are going to be packed.
        codec.check_range(state.tail if coded is None else coded)
    except NonFiniteError as error:
        raise FormatError(f"the snapshot can't be right: {error}") from error
    _need(state.start <= state.packed <= state.length, "tokens without slots in front of the tail")
    left = out_of_window(codec.group, window, state.length)
    # A codec that was calibrated takes tokens that wait for one that is to learn from them.
    if codec.ready and (state.learnt or not codec.state()):
        _need(state.packed >= left, "tokens that left the window and have no slots")
    else:
        _need(left < max(codec.learns_from, 1), "tokens that nothing was learnt from")
    check_slots(codec, state)


def _need(good: bool, what: str) -> None:
    if not good:
        raise FormatError(f"the snapshot can't be right: {what}")


def fitted_codec(codec: Codec, stream: StreamState, device: torch.device) -> Codec:
    """Return a codec with what the snapshot's learnt; the fields are checked."""
    if NAME in stream.learnt:
        rest = {name: x for name, x in stream.learnt.items() if name != NAME}
        codec = fitted_codec(codec, replace(stream, learnt=rest), device)
        return scaled_as(codec, stream.learnt[NAME])
    if isinstance(codec, FittedCodec):
        learnt = {name: tensor.to(device) for name, tensor in stream.learnt.items()}
        if stream.packed and not learnt:
            raise FormatError("the snapshot has packed slots and not what their method learnt")
        # A codec with the same calibration stays, so that its state is not held twice.
        here = all(tensor.device == device for tensor in codec.state().values())
        if learnt and not (here and learnt_alike(codec, stream)):
            codec = codec.restore(learnt)
            codec.check_heads(stream.tail.shape[1])
    elif stream.learnt:
        raise FormatError("the snapshot has learnt what its method does not learn")
    # Which fields there are may be learnt.
    calibrated = bool(codec.state()) and not stream.learnt
    if not calibrated and tuple(field_info(field) for field in codec.fields) != stream.fields:
        raise FormatError("the snapshot's fields are not those of its method")
    return codec


def learnt_states(
    snapshot: Snapshot, specs: Sequence[Spec], geometry: CacheGeometry, device: torch.device
) -> Calibration:
    """Return what the codecs of every layer had learnt, on a device; errors as of a restore."""
    check_fits(snapshot.state()._replace(records=()), geometry)
    states, dtype = {}, geometry.dtype or torch.float32
    for index, spec in enumerate(specs):
        _check_spec(index, held := snapshot.layer(index, 0, 0), spec, dtype)
        if held.streams is not None:
            k, v = ({n: x.to(device) for n, x in stream.learnt.items()} for stream in held.streams)
            states[index] = (k, v)
    return states


def learnt_alike(codec: Codec, stream: StreamState) -> bool:
    """Return whether a codec has learnt exactly what a state's has."""
    known, learnt = ({n: x.cpu() for n, x in y.items()} for y in (codec.state(), stream.learnt))
    return same_tensors(known, learnt)


def check_slots(codec: Codec, state: StreamState) -> None:
    """Raise `FormatError` unless the slots of tokens that are not there are zero."""
    for field in codec.fields:
        storage = state.slots.get(field.name)
        if storage is None:
            continue
        first = state.packed // lcm(field.tokens, TILE) * lcm(field.tokens, TILE)
        rest = storage[:, :, first // field.tokens :].clone()
        before = rest.clone()
        field.clear_from(rest, state.packed - first)
        if not torch.equal(_bits(before), _bits(rest)):
            raise FormatError(f"field {field.name!r} has slots of tokens that are not there")


def _bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().flatten().view(torch.uint8)
