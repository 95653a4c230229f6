"""Sequences of a paged cache, compressed and back: packed slots stay packed where they can."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from kvpact.cache import PagedKVCache
from kvpact.cache.layer import CacheLayer
from kvpact.cache.stream import Stream
from kvpact.compressor.compressed import CompressedKV
from kvpact.compressor.stream import PackedStream
from kvpact.errors import GeometryError
from kvpact.methods import Codec, Method
from kvpact.spec import Spec


def _same(a: Method, b: Method) -> bool:
    """Whether two methods pack tokens alike; sinks and window are beside the slots."""
    return replace(a, sinks=0, window=0) == replace(b, sinks=0, window=0)


def _entry(cache: PagedKVCache, layer: int, seq_id: int) -> CacheLayer:
    cache.seq_len(seq_id, layer)
    return cache._sequence(seq_id).layers[layer]


def compress(cache: PagedKVCache, layer: int, seq_id: int, spec: Spec) -> CompressedKV:
    """Compress a sequence: see `KVCacheCompressor.compress_paged_cache`."""
    entry = _entry(cache, layer, seq_id)
    with entry.lock:
        if entry.k is None or entry.v is None or entry.length == 0:
            raise GeometryError(f"sequence {seq_id} holds no tokens in layer {layer}")
        k = _stream(entry, "k", entry.k, spec.key, entry.spec.key)
        v = _stream(entry, "v", entry.v, spec.value, entry.spec.value)
    return CompressedKV(spec, "unbatched", 1, k, v)


def _stream(
    entry: CacheLayer, side: str, source: Stream, wanted: Method, held: Method
) -> PackedStream:
    if not _same(wanted, held):
        x = entry.dequantize(side)
        make = wanted.key_codec if side == "k" else wanted.value_codec
        return PackedStream.empty(make(x.shape[3], x.dtype), x).fitted(x).append(x)
    # A group that a rollback cut is not whole; its tokens go on as they are.
    packed = source.packed - source.packed % source.codec.group
    known = source.length - source.tail.shape[2]
    if packed >= known:
        rest = source.tail[:, :, packed - known :].clone()
    else:
        rest = entry.dequantize(side)[:, :, packed:].clone()
    # What the tokens were before they were packed is not known any more, nor is the error.
    stream = PackedStream(source.codec, {}, rest, packed, torch.nan, torch.nan)
    if not packed:
        return stream
    slots, pages = {}, source.store.source()
    tokens = -(-packed // stream.unit) * stream.unit
    count = -(-packed // source.store.segment_tokens)
    for field in source.codec.fields:
        storage = pages.gather(field.name, 0, count)[:, :, : tokens // field.tokens].clone()
        field.clear_from(storage, packed)
        slots[field.name] = storage
    return replace(stream, slots=slots)


def decompress(compressed: CompressedKV, cache: PagedKVCache, layer: int, seq_id: int) -> None:
    """Append to a sequence: see `KVCacheCompressor.decompress_to_paged_cache`."""
    entry = _entry(cache, layer, seq_id)
    if compressed.batch != 1:
        raise GeometryError(f"{compressed.batch} rows can't become one sequence")
    geometry, dtype = cache.geometry, geometry_dtype(cache)
    heads = compressed.k.open.shape[1]
    widths = (compressed.k.open.shape[3], compressed.v.open.shape[3])
    if (heads, *widths) != (geometry.num_kv_heads, geometry.head_dim, geometry.value_dim):
        raise GeometryError(
            f"{heads} heads of width {widths} don't fit a cache of {geometry.num_kv_heads} heads "
            f"of width ({geometry.head_dim}, {geometry.value_dim})"
        )
    if entry.length == 0 and dtype == compressed.dtype and _fits(compressed, entry):
        _adopt(compressed, cache, entry, seq_id)
    else:
        k, v = (x.reshape(-1, *x.shape[-2:]).to(dtype) for x in compressed.decompress())
        cache.append(layer, {seq_id: (k.to(cache.device), v.to(cache.device))})


def geometry_dtype(cache: PagedKVCache) -> torch.dtype:
    """Return the dtype of a cache's tokens."""
    return cache.geometry.dtype or torch.float32


def _fits(compressed: CompressedKV, entry: CacheLayer) -> bool:
    """Whether the cache would pack tokens to the same slots."""
    methods = zip(_sides(compressed.spec), _sides(entry.spec), strict=True)
    if not all(_same(a, b) for a, b in methods):
        return False
    wanted = (compressed.k, compressed.v)
    made = (entry._new_stream(s.open, s is compressed.k).codec for s in wanted)
    return all(_learnt_the_same(a.codec, b) for a, b in zip(wanted, made, strict=True))


def _sides(spec: Spec) -> tuple[Method, Method]:
    return spec.key, spec.value


def _learnt_the_same(a: Codec, b: Codec) -> bool:
    x, y = a.state(), b.state()
    return x.keys() == y.keys() and all(torch.equal(x[name], y[name].to(x[name])) for name in x)


def _adopt(compressed: CompressedKV, cache: PagedKVCache, entry: CacheLayer, seq_id: int) -> None:
    """Copy slots into the pages of an empty layer."""
    cache.reserve([seq_id], compressed.tokens)
    with entry.lock:
        device = cache.device
        streams = [
            _filled(entry._new_stream(source.open.to(device), key), source, device)
            for source, key in ((compressed.k, True), (compressed.v, False))
        ]
        entry.k, entry.v = streams


def _filled(target: Stream, source: PackedStream, device: torch.device) -> Stream:
    size = target.store.segment_tokens
    for page in range(-(-source.packed // size)):
        segment = target.store.segment(page)
        for field in source.codec.fields:
            units = size // field.tokens
            part = source.slots[field.name][:, :, page * units : (page + 1) * units]
            segment[field.name][:, :, : part.shape[2]] = part.to(device)
    target.adopt(source.packed, _sinks(target, source, device))
    if source.open.shape[2]:
        target.commit(target.prepare(source.open.to(device), None))
    return target


def _sinks(target: Stream, source: PackedStream, device: torch.device) -> Tensor | None:
    """Return the sinks as the slots have them; nobody knows them better any more."""
    if target.sinks is None:
        return None
    sinks, count = target.sinks.clone(), min(target.sinks.shape[2], source.length)
    packed = min(count, source.packed)
    if packed:
        sinks[:, :, :packed] = source.read(0, packed).to(device)
    sinks[:, :, packed:count] = source.open[:, :, : count - packed].to(device)
    return sinks
