"""K and V of a layer of a cache, compressed and back: packed slots stay packed where they can.

A sequence of a paged cache is one row without a batch dimension; a contiguous cache (of latents)
is a batch of rows. Rows of a batch lie beside the heads in a `CompressedKV`.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from kvpact.cache import ContiguousCache, PagedKVCache
from kvpact.cache.layer import CacheLayer
from kvpact.cache.saved import learnt_alike, restored_layer, stream_state
from kvpact.cache.stream import Stream
from kvpact.compressor.compressed import CompressedKV
from kvpact.compressor.stream import PackedStream, flat, without_window
from kvpact.errors import CacheFull, GeometryError, SequenceError
from kvpact.geometry import CacheGeometry
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
    _check_fit(compressed, cache.geometry)
    dtype = cache.geometry.dtype or (torch.float32 if seq_id is not None else compressed.dtype)
    device = cache.device if isinstance(cache, PagedKVCache) else compressed.device
    held = entry.k.tail.shape[0] if entry.k is not None else None
    empty = entry.length == 0 and held in (None, compressed.batch)
    if empty and dtype == compressed.dtype and _fits(compressed, entry):
        if isinstance(cache, PagedKVCache):
            assert seq_id is not None
            cache.reserve([seq_id], compressed.tokens)
        else:
            _check_room(compressed, cache)
        _adopt(compressed, entry, device)
        return
    k, v = (x.reshape(compressed.batch, -1, *x.shape[-2:]) for x in compressed.decompress())
    k, v = k.to(device, dtype), v.to(device, dtype)
    if isinstance(cache, PagedKVCache):
        assert seq_id is not None
        cache.append(layer, {seq_id: (k[0], v[0])})
    else:
        cache.store(layer, k, v)


def _entry(cache: AnyCache, layer: int, seq_id: int | None) -> CacheLayer:
    if isinstance(cache, PagedKVCache):
        if seq_id is None:
            raise SequenceError("a paged cache holds many sequences: name one with seq_id")
        return cache.layer_of(seq_id, layer)
    if seq_id is not None:
        raise SequenceError("a contiguous cache has no sequences: leave seq_id out")
    return cache.entry(layer)


def _check_fit(compressed: CompressedKV, geometry: CacheGeometry) -> None:
    heads = compressed.k.open.shape[1] // compressed.batch
    widths = (compressed.k.open.shape[3], compressed.v.open.shape[3])
    if (heads, *widths) != (geometry.num_kv_heads, geometry.head_dim, geometry.value_dim):
        raise GeometryError(
            f"{heads} heads of width {widths} don't fit a cache of {geometry.num_kv_heads} heads "
            f"of width ({geometry.head_dim}, {geometry.value_dim})"
        )


def _check_room(compressed: CompressedKV, cache: ContiguousCache) -> None:
    if cache.batch_size not in (None, compressed.batch):
        raise GeometryError(f"batch {compressed.batch}, but other layers hold {cache.batch_size}")
    if cache.max_tokens is not None and compressed.tokens > cache.max_tokens:
        raise CacheFull(f"{compressed.tokens} tokens wanted, {cache.max_tokens} allowed")


def same_slots(a: Method, b: Method) -> bool:
    """Whether two methods pack tokens alike; sinks and window are beside the slots."""
    return replace(a, sinks=0, window=0) == replace(b, sinks=0, window=0)


def _stream(
    entry: CacheLayer, side: str, source: Stream, wanted: Method, held: Method, compute: Compute
) -> PackedStream:
    # What a codec learnt has one part per head; rows of a batch would each need it.
    shared = source.tail.shape[0] > 1 and isinstance(source.codec, FittedCodec)
    if shared or not same_slots(wanted, held):
        x = flat(entry.dequantize(side))
        make = wanted.key_codec if side == "k" else wanted.value_codec
        return PackedStream.fitted(make(x.shape[3], x.dtype), x, compute).append(x)
    state = stream_state(source)
    # A group that a rollback cut is not whole; its tokens go on as they are read.
    whole = state.packed - state.packed % source.codec.group
    cut = whole < max(state.start, state.packed)
    rest = entry.dequantize(side)[:, :, whole:] if cut else None
    # What the tokens were before they were packed is not known any more, nor is the error.
    return PackedStream(source.codec, without_window(state, rest), torch.nan, torch.nan, compute)


def _fits(compressed: CompressedKV, entry: CacheLayer) -> bool:
    """Whether the cache would pack tokens to the same slots."""
    packed = (compressed.k, compressed.v)
    methods = zip(_sides(compressed.spec), _sides(entry.spec), strict=True)
    return all(same_slots(a, b) for a, b in methods) and all(
        learnt_alike(entry.make_codec(stream.open, key), stream.held)
        for stream, key in zip(packed, (True, False), strict=True)
    )


def _sides(spec: Spec) -> tuple[Method, Method]:
    return spec.key, spec.value


def _adopt(compressed: CompressedKV, entry: CacheLayer, device: torch.device) -> None:
    """Copy slots into an empty layer."""
    k, v = (
        _with_sinks(stream, compressed.batch, method.sinks)
        for stream, method in zip((compressed.k, compressed.v), _sides(entry.spec), strict=True)
    )
    restored_layer(entry, LayerState(entry.spec.to_json(), (k, v), None), device, shared=False)


def _with_sinks(source: PackedStream, batch: int, count: int) -> StreamState:
    """Return a stream's state by rows, with sinks as the slots have them."""

    def rows(x: Tensor) -> Tensor:
        return x.reshape(batch, x.shape[1] // batch, *x.shape[2:])

    sinks = source.open.new_zeros(*source.open.shape[:2], count, source.open.shape[3])
    held = min(count, source.length)
    packed = min(count, source.packed)
    if packed:
        source.read(0, packed, sinks[:, :, :packed])
    sinks[:, :, packed:held] = source.open[:, :, : held - packed]
    return replace(
        source.held,
        slots={name: rows(x) for name, x in source.slots.items()},
        tail=rows(source.open),
        sinks=rows(sinks) if count else None,
    )
