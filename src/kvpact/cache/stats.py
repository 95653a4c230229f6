"""The bytes of a cache by their use, counted from its tensors or planned from its format."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from math import nan
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kvpact.cache.layer.layer import CacheLayer
from kvpact.cache.stream.codecs import codecs_of
from kvpact.cache.stream.stream import Stream
from kvpact.callable_package import Figures
from kvpact.files import size_text
from kvpact.geometry import CacheGeometry
from kvpact.kernels import Compute
from kvpact.methods import Codec, Method, bytes_per_slot
from kvpact.spec import Spec
from kvpact.units import StreamFacts


class Summary(NamedTuple):
    """A summary of a cache; `exact`: bytes of the same tokens, uncompressed."""

    spec: str
    rows: int
    tokens: int
    nbytes: int
    exact: int

    @classmethod
    def of(
        cls, specs: Iterable[Spec], layers: Iterable[CacheLayer], nbytes: int, rows: int = 0
    ) -> Summary:
        """Return the summary of layers; `rows` where each row has layers of its own."""
        found: list[tuple[int, torch.Tensor]] = []
        for k, v in filter(None, (layer.streams() for layer in layers)):
            keys = k.tail if k.tail.shape[3] else v.tail  # made of values, they are as wide
            found += (k.length, keys), (v.length, v.tail)
        rows = rows or max((len(tail) for _, tail in found), default=0)
        exact = sum(n * x.shape[:2].numel() * x.shape[3] * x.element_size() for n, x in found)
        return cls(spec_text(specs), rows, max((n for n, _ in found), default=0), nbytes, exact)


class Summarized:
    """The properties that summarize every cache."""

    def _summary(self) -> Summary:
        raise NotImplementedError

    @property
    def spec(self) -> str:
        """The spec of all layers; ``mixed`` where they differ."""
        return self._summary().spec

    @property
    def nbytes(self) -> int:
        """Bytes held; a model's cache counts the layers that stay as they are, too."""
        return self._summary().nbytes

    @property
    def saved(self) -> float:
        """Share of an exact cache's bytes that is saved, in K's and V's dtype; NaN while empty."""
        found = self._summary()
        return 1 - found.nbytes / found.exact if found.exact else nan

    def __repr__(self) -> str:
        found = self._summary()
        parts = [found.spec, "empty"]
        if found.exact:
            tokens = f"{found.tokens:,} token{'s' * (found.tokens != 1)}"
            tokens = f"{found.rows} x {tokens}" if found.rows > 1 else tokens
            share = f"{100 * found.nbytes / found.exact:.0f} % of an exact cache"
            parts[1:] = [tokens, size_text(found.nbytes), share]
        return f"<{type(self).__name__} {' | '.join(parts)}>"


def spec_text(specs: Iterable[Spec]) -> str:
    """Return the spec of all layers; ``mixed`` where they differ."""
    texts = {str(spec) for spec in specs}
    return texts.pop() if len(texts) == 1 else "mixed"


def cache_stats(layers: Iterable[CacheLayer], layout: str, compute: Compute) -> dict[str, Any]:
    """Return what layers hold; codebooks and signs, which a process needs once, are not counted.

    ``bytes``: ``codes``, ``side``, ``sinks``, ``window``, ``unused`` (allocated), ``total``;
    ``bits_per_value`` of all these, ``slot_bits_per_value`` of the first two per packed value; None
    of no values.
    """
    sizes = dict.fromkeys(("codes", "side", "sinks", "window", "unused"), 0)
    tokens = values = packed = 0
    layers = list(layers)
    for layer in layers:
        with layer.lock:
            layer.verify()
            tokens = max(tokens, layer.length)
            sizes["sinks"] += 0 if layer.padding is None else layer.padding.nbytes
            sizes["side"] += sum(tensor.nbytes for tensor in layer.waiting_state())
            for stream in (layer.k, layer.v):
                if stream is not None:
                    batch, heads, _, dim = stream.tail.shape
                    values += batch * heads * dim * stream.length
                    packed += batch * heads * dim * stream.packed
                    _count(stream, sizes)
    total = sum(sizes.values())
    used = sizes["codes"] + sizes["side"]
    return {
        "spec": spec_text(layer.spec for layer in layers),
        "layout": layout,
        "compute": compute.stats(),
        "tokens": tokens,
        "values": values,
        "packed_values": packed,
        "bytes": Figures(**sizes, total=total),
        **_bits(total, used, values, packed),
    }


def paged_stats(
    layers: list[CacheLayer], pool: list[Tensor], total: int, compute: Compute
) -> dict[str, Any]:
    """Return `cache_stats` of layers on a pool; slots are the pool's, shared ones count once."""
    stats = cache_stats(layers, "paged", compute)
    held = sum(tensor.nbytes for tensor in pool)
    used = {"codes": 0.0, "side": 0.0}
    for stream in (stream for layer in layers for stream in layer.streams()):
        for field in stream.codec.fields:
            used[field.kind] += field.bytes_per_token * stream.packed * stream.tail.shape[1]
    slots, sizes = sum(used.values()), stats["bytes"]
    shrink = min(1.0, held / slots) if slots else 1.0
    sizes |= {kind: round(count * shrink) for kind, count in used.items()}
    sizes |= {"unused": held - sizes["codes"] - sizes["side"], "total": total}
    return stats | _bits(total, slots, stats["values"], stats["packed_values"])


def _bits(total: float, slots: float, values: int, packed: int) -> dict[str, float | None]:
    """Return the bits of all bytes per value, and of slots per packed value."""
    return {
        "bits_per_value": total * 8 / values if values else None,
        "slot_bits_per_value": slots * 8 / packed if packed else None,
    }


def _count(stream: Stream, sizes: dict[str, int]) -> None:
    batch, heads = stream.tail.shape[:2]
    for field in stream.codec.fields:
        held = sum(tensor.nbytes for tensor in stream.store.tensors(field.name))
        used = min(round(field.bytes_per_token * stream.packed * batch * heads), held)
        sizes[field.kind] += used
        sizes["unused"] += held - used
    sizes["side"] += sum(tensor.nbytes for tensor in stream.codec.state().values())
    sizes["window"] += stream.tail.nbytes
    sizes["unused"] += stream.room
    if stream.sinks is not None:
        sizes["sinks"] += stream.sinks.numel() * stream.sinks.element_size()


def _codecs(spec: Spec, geometry: CacheGeometry) -> list[tuple[Method, Codec, int]]:
    k, v = codecs_of(spec, geometry, torch.float16)
    return [(spec.key, k, geometry.head_dim), (spec.value, v, geometry.value_dim)]


def bytes_per_token(spec: Spec, geometry: CacheGeometry) -> dict[str, float]:
    """Return the bytes of packed slots per token and layer: ``key_bytes`` and ``value_bytes``.

    The dtype (it matters to method `none`) is the geometry's, or fp16.
    """
    key, value = (
        bytes_per_slot(codec) * geometry.num_kv_heads for _, codec, _ in _codecs(spec, geometry)
    )
    return {"key_bytes": key, "value_bytes": value}


def unplanned(spec: Spec, geometry: CacheGeometry) -> list[str]:
    """Return what `planned_bytes` can't know before the tokens are there, in words."""
    notes = [codec.unplanned for _, codec, _ in _codecs(spec, geometry)]
    return sorted({note for note in notes if note})


def planned_bytes(
    spec: Spec, geometry: CacheGeometry, tokens: int, batch: int = 1
) -> dict[str, int]:
    """Return the bytes that a contiguous cache holds after `tokens` tokens, without making it.

    Equal to what `memory_usage` counts, but for what `unplanned` names and the room after the tail.
    """
    itemsize = (geometry.dtype or torch.float16).itemsize
    found: Counter[str] = Counter()
    for facts in stream_facts(spec, geometry):
        found.update(facts.held(tokens, batch, geometry.num_kv_heads, itemsize))
    sizes = {name: count * geometry.num_layers for name, count in found.items()}
    return {**sizes, "total": sum(sizes.values())}


def stream_facts(spec: Spec, geometry: CacheGeometry) -> list[StreamFacts]:
    """Return what the bytes of K and of V of one layer depend on."""
    return [
        StreamFacts(
            bytes_per_slot(codec),
            dim,
            codec.group,
            method.sinks,
            method.window,
            codec.learns_from,
            codec.state_bytes(geometry.num_kv_heads),
        )
        for method, codec, dim in _codecs(spec, geometry)
    ]
