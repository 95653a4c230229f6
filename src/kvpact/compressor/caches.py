"""K and V of a layer of a cache, compressed and back: packed slots stay packed where they can.

Rows of a batch are joined with the heads; a sequence of a paged cache is one without a batch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import lcm

import torch
from torch import Tensor

from kvpact.cache import ContiguousCache, PagedKVCache
from kvpact.cache.layer.layer import CacheLayer
from kvpact.cache.layer.states import learnt_alike, restored_layer, stream_state
from kvpact.cache.stream.stream import Stream
from kvpact.compressor.compressed import CompressedKV
from kvpact.compressor.stream import PackedStream, empty_stream, flat
from kvpact.errors import GeometryError, SequenceError
from kvpact.formats import TILE
from kvpact.kernels import Compute
from kvpact.methods import Method
from kvpact.methods.fitted import FittedCodec
from kvpact.snapshot import LayerState, StreamState
from kvpact.spec import Spec

AnyCache = ContiguousCache | PagedKVCache


def compress(
    cache: AnyCache, layer: int, seq_id: int | None, spec: Spec, compute: Compute
) -> CompressedKV:
    """Compress a layer: see `KVCacheCompressor.compress_paged_cache`."""
    entry = _entry(cache, layer, seq_id)
    with entry.lock:
        if entry.k is None or entry.v is None or entry.length == 0:
            held = "the cache" if seq_id is None else f"sequence {seq_id}"
            raise GeometryError(f"{held} holds no tokens in layer {layer}")
        if entry.padding is not None and entry.padding.any():
            raise GeometryError(
                "rows with padding can't be compressed together: what is padding would be lost; "
                "select a row, or take a snapshot of the cache"
            )
        k = _stream(entry, "k", entry.k, spec.key, entry.spec.key, compute)
        v = _stream(entry, "v", entry.v, spec.value, entry.spec.value, compute)
        if seq_id is None:
            return CompressedKV(spec, "batched", entry.k.tail.shape[0], k, v)
    return CompressedKV(spec, "unbatched", 1, k, v)


def decompress(compressed: CompressedKV, cache: AnyCache, layer: int, seq_id: int | None) -> None:
    """Append to a layer: see `KVCacheCompressor.decompress_to_paged_cache`."""
    entry = _entry(cache, layer, seq_id)
    if seq_id is not None and compressed.batch != 1:
        raise GeometryError(f"{compressed.batch} rows can't become one sequence")
    dtype = cache.geometry.dtype or (torch.float32 if seq_id is not None else compressed.dtype)
    device = cache.device if isinstance(cache, PagedKVCache) else compressed.device
    if dtype == compressed.dtype and _fits(compressed, entry, cache):
        if isinstance(cache, PagedKVCache):
            assert seq_id is not None
            cache.reserve([seq_id], compressed.tokens)
        _adopt(compressed, entry, device)
        return
    # What does not fit, the cache names.
    k, v = (x.reshape(compressed.batch, -1, *x.shape[-2:]) for x in compressed.decompress())
    k, v = k.to(device, dtype), v.to(device, dtype)
    if isinstance(cache, PagedKVCache):
        assert seq_id is not None
        cache.append(layer, {seq_id: (k[0], v[0])})
    else:
        cache.store(layer, k=k, v=v)


def _entry(cache: AnyCache, layer: int, seq_id: int | None) -> CacheLayer:
    if isinstance(cache, PagedKVCache):
        if seq_id is None:
            raise SequenceError("a paged cache holds many sequences: name one with seq_id")
        return cache.layer_of(seq_id, layer)
    if seq_id is not None:
        raise SequenceError("a contiguous cache has no sequences: leave seq_id out")
    return cache.entry(layer)


def same_slots(a: Method, b: Method) -> bool:
    """Return whether two methods make the same slots; sinks and window lie outside of them."""
    return replace(a, sinks=0, window=0) == replace(b, sinks=0, window=0)


def _stream(
    entry: CacheLayer, side: str, source: Stream, wanted: Method, held: Method, compute: Compute
) -> PackedStream:
    # What a codec learnt has one part per head; rows of a batch would each need it. Slots of keys
    # without their offset are to be understood with it alone.
    shared = source.tail.shape[0] > 1 and isinstance(source.codec, FittedCodec)
    own = source.codec.ready and not shared and source.offset is None
    if not own or not same_slots(wanted, held):
        x = flat(entry.dequantize(side))
        make = wanted.key_codec if side == "k" else wanted.value_codec
        return PackedStream.of(make(x.shape[3], x.dtype), x, compute)
    # Tokens of the window are packed, too, in a stream apart from the cache's.
    codec, state, tail = source.codec, stream_state(source), flat(source.tail)
    whole = source.length - source.length % codec.group
    slots = {name: x.flatten(0, 1)[None] for name, x in state.slots.items()}
    stream = empty_stream(codec, tail, compute)
    stream = _sealed(stream.restore(state.packed, state.start, tail, None, slots), whole)
    # A group that a rollback cut is not whole; its tokens go on as they are read.
    cut = whole < max(state.start, state.packed)
    rest = flat(entry.dequantize(side))[:, :, whole:] if cut else tail[:, :, whole - state.start :]
    sinks: Mapping[str, Tensor] = {}
    if whole and codec.group > 1 and source.num_sinks:
        # A cache's slots do not have their sinks: those groups are encoded again, as they read.
        unit = lcm(codec.group, TILE)
        end = min(-(-source.num_sinks // unit) * unit, whole)
        first = flat(entry.dequantize(side)[:, :, :end])
        alone = empty_stream(codec, first, compute).restore(0, 0, first, None)
        sinks = stream_state(_sealed(alone, end)).slots
    store = stream.store.cut(whole)
    store.clear_from(whole)
    stream = stream._replace(store=store).restore(whole, whole, rest.clone(), None, sinks)
    # What the tokens were before they were packed is not known any more, nor is the error.
    return PackedStream(stream, compute)


def _sealed(stream: Stream, tokens: int) -> Stream:
    """Return a stream of one owner with slots of so many tokens at least."""
    append = stream.sealed(tokens, None)
    append.write()
    return append.after


def _fits(compressed: CompressedKV, entry: CacheLayer, cache: AnyCache) -> bool:
    """Return whether a layer is empty, has room, and would pack tokens to the same slots."""
    packed, batch, geometry = (compressed.k, compressed.v), compressed.batch, cache.geometry
    shapes = [(s.stream.tail.shape[1], s.stream.tail.shape[3]) for s in packed]
    rows = geometry.num_kv_heads * batch
    if (
        entry.length
        or entry.offset is not None
        or shapes != [(rows, geometry.head_dim), (rows, geometry.value_dim)]
    ):
        return False
    if isinstance(cache, ContiguousCache):
        most = cache.max_tokens
        if cache.batch_size not in (None, batch) or (most is not None and compressed.tokens > most):
            return False
    given, own = compressed.spec, entry.spec
    same = same_slots(given.key, own.key) and same_slots(given.value, own.value)
    return same and all(
        learnt_alike(entry.new_stream(stream.stream.tail, key).codec, stream.held)
        for stream, key in zip(packed, (True, False), strict=True)
    )


def _adopt(compressed: CompressedKV, entry: CacheLayer, device: torch.device) -> None:
    """Copy slots into an empty layer."""
    k = _with_sinks(compressed.k, compressed.batch, entry.spec.key.sinks)
    v = _with_sinks(compressed.v, compressed.batch, entry.spec.value.sinks)
    restored_layer(entry, LayerState(entry.spec.to_json(), (k, v), None), device, shared=False)


def _with_sinks(source: PackedStream, batch: int, count: int) -> StreamState:
    """Return a stream's state by rows, with sinks as the slots have them."""

    def rows(x: Tensor) -> Tensor:
        return x.reshape(batch, x.shape[1] // batch, *x.shape[2:])

    state = source.held
    packed, held = min(count, state.packed), min(count, state.length)
    sinks = state.tail.new_zeros(*state.tail.shape[:2], count, state.tail.shape[3])
    if packed:
        sinks[:, :, :packed] = source.read(0, packed)
    sinks[:, :, packed:held] = state.tail[:, :, : held - packed]
    return replace(
        state,
        slots={name: rows(x) for name, x in state.slots.items()},
        tail=rows(state.tail),
        sinks=rows(sinks) if count else None,
    )
