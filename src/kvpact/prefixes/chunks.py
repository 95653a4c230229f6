"""Chunks: the packed slots of some tokens in all layers, as one blob, and prefixes made of them.

A blob is a checksummed container with two tensors of bytes: ``slots``, layer after layer as a page
of a snapshot has them, and ``sinks``, the exact copies of those sink tokens that stand among the
chunk's. What the bytes mean (specs, geometry, model, …) stands in it as one hash.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from typing import Any

import torch
from torch import Tensor

from kvpact.cache.layer.layer import CacheLayer
from kvpact.cache.layer.states import field_info, packed_part
from kvpact.errors import FormatError
from kvpact.formats.base import FORMAT_VERSION
from kvpact.geometry import CacheGeometry
from kvpact.key_offset import KeyOffset
from kvpact.methods import Codec
from kvpact.snapshot import (
    Container,
    FieldInfo,
    Identity,
    LayerState,
    RecordState,
    StreamState,
    token_hash,
)
from kvpact.snapshot.container import as_bytes
from kvpact.snapshot.pages import outside_heap, pack_pages, page_bytes, unpack_pages
from kvpact.snapshot.state import CacheState, geometry_json
from kvpact.spec import Spec
from kvpact.stores.base import Blob

KIND = "kvpact.prefix"
VERSION = 1
SLOTS, SINKS = "slots", "sinks"
_TOGETHER = 4 << 20
"""Bytes of layers that are copied, and released, together."""


@dataclass(frozen=True)
class Chunk:
    """The checked contents of a blob: bytes of the slots and of the sinks, `[n]` uint8."""

    slots: Tensor
    sinks: Tensor


@dataclass(frozen=True)
class ChunkKind:
    """All that makes the bytes of equal tokens differ, and how bytes become a cache's state."""

    specs: tuple[Spec, ...]
    geometry: CacheGeometry
    codecs: tuple[tuple[Codec, Codec], ...]
    identity: Identity
    size: int
    offsets: Mapping[int, KeyOffset] = field(default_factory=dict)

    @cached_property
    def _specs_json(self) -> list[dict[str, Any]]:
        texts = {spec: spec.to_json() for spec in set(self.specs)}
        return [texts[spec] for spec in self.specs]

    @cached_property
    def _fields(self) -> list[tuple[tuple[FieldInfo, ...], tuple[FieldInfo, ...]]]:
        """The fields of K and V, layer by layer."""
        return [
            (tuple(map(field_info, k.fields)), tuple(map(field_info, v.fields)))
            for k, v in self.codecs
        ]

    @cached_property
    def slot_bytes(self) -> list[int]:
        """Bytes of a chunk's slots in each layer."""
        heads = self.geometry.num_kv_heads
        return [page_bytes([*k, *v], heads, self.size) for k, v in self._fields]

    @cached_property
    def salt(self) -> bytes:
        """The start of the chain of keys: a hash of everything here."""
        learnt = hashlib.blake2b(digest_size=32)
        for index, pair in enumerate(self.codecs):
            for side, codec in zip("kv", pair, strict=True):
                for name, tensor in sorted(codec.state().items()):
                    what = f"{index} {side} {name} {tensor.dtype} {tuple(tensor.shape)}\n"
                    learnt.update(what.encode())
                    learnt.update(as_bytes(tensor).numpy().data)
        data: dict[str, Any] = {
            "chunk": self.size,
            "format": [KIND, VERSION],
            "geometry": geometry_json(self.geometry),
            "identity": self.identity.to_json(),
            "learnt": learnt.hexdigest(),
            "slots": FORMAT_VERSION,
            "specs": self._specs_json,
        }
        if self.offsets:  # keys of caches without any are what they always were
            data["offsets"] = [[i, self.offsets[i].digest] for i in sorted(self.offsets)]
        return hashlib.blake2b(json.dumps(data, sort_keys=True).encode(), digest_size=32).digest()

    def _manifest(self, index: int, part: Sequence[int]) -> dict[str, Any]:
        return {
            "begin": index * self.size,
            "kind": self.salt.hex(),
            "tokens": token_hash(torch.tensor([part], dtype=torch.int64, device="cpu")),
        }

    def pack(
        self, layers: Sequence[CacheLayer], first: int, last: int, ids: Sequence[int]
    ) -> Iterator[bytes]:
        """Yield the blobs of a sequence's chunks `first <= i < last`, slots as they lie."""
        states = [
            packed_part(layer, spec, first * self.size, last * self.size)
            for layer, spec in zip(layers, self._specs_json, strict=True)
        ]
        pages = [pack_pages(s.streams or (), last - first, self.size) for s in states]
        rows, exact = torch.cat(pages, dim=1), [s.sinks for x in states for s in x.streams or ()]
        for index in range(first, last):
            begin = (index - first) * self.size
            held = [as_bytes(x[:, :, begin : begin + self.size]) for x in exact if x is not None]
            exact_bytes = torch.cat(held) if held else rows.new_zeros(0)
            part = ids[index * self.size : (index + 1) * self.size]
            yield self.seal(Chunk(rows[index - first], exact_bytes), index, part)

    def seal(self, chunk: Chunk, index: int, part: Sequence[int]) -> bytes:
        """Return the blob of a chunk. `part`: its own token ids; their hash goes into the blob."""
        named = [(SLOTS, chunk.slots), (SINKS, chunk.sinks)]
        tensors = [(name, x) for name, x in named if x.numel()]
        runs = [(1, [sum(x.nbytes for _, x in tensors)])]
        manifest = self._manifest(index, part)
        return Container.build(KIND, VERSION, manifest, tensors, runs).to_bytes()

    def unpack(
        self, blob: Blob, index: int, part: Sequence[int], out: Tensor | None = None
    ) -> Chunk:
        """Return what a blob of `seal` holds, every byte checked; the slots in `out`, if given."""
        held = Container(blob, KIND, VERSION)
        if held.about != self._manifest(index, part):
            raise FormatError("the chunk is of other tokens, or of another model or spec")
        sizes = {SLOTS: sum(self.slot_bytes), SINKS: sum(self.sink_sizes(index))}
        _, *found = [(name, x.dtype, x.end - x.begin) for name, x in held.entries.items()]
        wanted = [(name, torch.uint8, size) for name, size in sizes.items() if size]
        if held.num_sections != 1 or found != wanted:
            raise FormatError("the chunk's tensors are not those of its kind")
        slots, exact = torch.split(held.section(0, out), list(sizes.values()))
        exact, dtype = exact.clone(), self.geometry.dtype  # it stays when the slots have gone
        assert dtype is not None
        if not torch.isfinite(exact.view(dtype)).all():
            raise FormatError("the chunk's exact tokens are not finite")
        return Chunk(slots, exact)

    def _sink_shapes(self, index: int) -> list[tuple[int, ...]]:
        """Return the shapes of a chunk's sinks, of K and V, layer by layer."""
        dims = (self.geometry.head_dim, self.geometry.value_dim)
        first, heads = index * self.size, self.geometry.num_kv_heads
        return [
            (1, heads, min(max(method.sinks - first, 0), self.size), dim)
            for spec in self.specs
            for method, dim in zip((spec.key, spec.value), dims, strict=True)
        ]

    def sink_sizes(self, index: int) -> list[int]:
        """Return the bytes of a chunk's sinks, of K and V, layer by layer."""
        assert self.geometry.dtype is not None
        return [prod(shape) * self.geometry.dtype.itemsize for shape in self._sink_shapes(index)]

    def sinks(self, chunks: Sequence[Tensor]) -> list[Tensor | None]:
        """Return the sinks of K and V, layer by layer; those after the last chunk are zero."""
        assert self.geometry.dtype is not None
        parts: list[list[Tensor]] = [[] for _ in range(2 * len(self.specs))]
        for index, chunk in enumerate(chunks):
            if index and not chunk.numel():
                break  # all sinks are in front
            split = torch.split(chunk, self.sink_sizes(index))
            for held, data, shape in zip(parts, split, self._sink_shapes(index), strict=True):
                held.append(data.clone().view(self.geometry.dtype).view(shape))
        found: list[Tensor | None] = []
        methods = [method for spec in self.specs for method in (spec.key, spec.value)]
        for held, method in zip(parts, methods, strict=True):
            one = torch.cat(held, 2)
            missing = one.new_zeros(1, one.shape[1], method.sinks - one.shape[2], one.shape[3])
            found.append(torch.cat([one, missing], 2) if method.sinks else None)
        return found

    def layer(
        self, index: int, end: int, data: Tensor, sinks: Sequence[Tensor | None]
    ) -> LayerState:
        """Return a layer after `end` tokens: of its slots in each chunk, and of all sinks."""
        heads, fields, streams = self.geometry.num_kv_heads, self._fields[index], []
        slots = unpack_pages(data, fields, (1, heads), self.size)
        for side, codec in enumerate(self.codecs[index]):
            dim = self.geometry.value_dim if side else self.geometry.head_dim
            tail = torch.zeros(1, heads, 0, dim, dtype=self.geometry.dtype, device="cpu")
            learnt = {name: x.detach().cpu() for name, x in codec.state().items()}
            exact = sinks[2 * index + side]
            offset = not side and not codec.exact and codec.rotation is None
            known = self.offsets.get(index) if offset else None
            streams.append(
                StreamState(fields[side], slots[side], end, end, tail, exact, learnt, known)
            )
        return LayerState(self._specs_json[index], (streams[0], streams[1]), None)


class Prefix:
    """Slots and sinks of up to `count` first chunks, put together layer by layer.

    Some layers at a time lie in memory of their own, which goes when a cache took them.
    """

    def __init__(self, kind: ChunkKind, count: int) -> None:
        self._kind, self._sinks = kind, dict[int, Tensor]()
        sizes = kind.slot_bytes
        step = max(_TOGETHER // max(count * max(sizes), 1), 1)
        self._parts = [sizes[first : first + step] for first in range(0, len(sizes), step)]
        self._slots = [outside_heap(count, sum(part)) for part in self._parts]
        self._one = outside_heap(sum(sizes) + sum(kind.sink_sizes(0)))

    def put(self, index: int, blob: Blob, ids: Sequence[int]) -> None:
        """Hold what the blob of a chunk of these tokens has; errors as of `ChunkKind.unpack`."""
        chunk = self._kind.unpack(blob, index, ids, self._one)
        parts = torch.split(chunk.slots, list(map(sum, self._parts)))
        for held, part in zip(self._slots, parts, strict=True):
            held[index] = part
        self._sinks[index] = chunk.sinks

    def state(self, count: int, records: Sequence[RecordState]) -> CacheState:
        """Return what a cache, and its model's other layers, hold after so many chunks."""
        geometry, tokens = self._kind.geometry, count * self._kind.size
        return CacheState(geometry, 1, tokens, self._layers(count, tokens), records)

    def _layers(self, count: int, tokens: int) -> Iterator[LayerState]:
        """Yield each layer; bytes go with the last one that lies with them."""
        sinks, number = self._kind.sinks([self._sinks[index] for index in range(count)]), 0
        for sizes in self._parts:
            for data in torch.split(self._slots.pop(0)[:count], sizes, 1):
                yield self._kind.layer(number, tokens, data, sinks)
                number += 1
