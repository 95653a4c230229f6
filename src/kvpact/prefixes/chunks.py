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
from typing import Any, Self

import torch
from torch import Tensor

from kvpact.cache.layer import CacheLayer
from kvpact.cache.saved import field_info, packed_part
from kvpact.errors import FormatError, SnapshotError
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
    Snapshot,
    StreamState,
    token_hash,
)
from kvpact.snapshot.container import as_bytes
from kvpact.snapshot.manifest import LayerEntry, Manifest, RecordInfo
from kvpact.snapshot.pages import outside_heap, pack_pages, page_bytes, unpack_pages
from kvpact.snapshot.state import geometry_json
from kvpact.spec import Spec

KIND = "kvpact.prefix"
VERSION = 1
SLOTS, SINKS = "slots", "sinks"


@dataclass(frozen=True)
class Chunk:
    """What a blob holds, checked: bytes of the slots and of the sinks, `[n]` uint8."""

    slots: Tensor
    sinks: Tensor


@dataclass(frozen=True)
class ChunkKind:
    """All that makes the bytes of equal tokens differ, and how bytes become a cache's state.

    `codecs`: the codecs of each layer, for K and V, fitted if they learn.
    """

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
        """What the chain of keys begins with: a hash of everything here."""
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

    def unpack(self, blob: bytes, index: int, part: Sequence[int]) -> Chunk:
        """Return what a blob of `seal` holds, every byte checked; parameters as there."""
        held = Container(blob, KIND, VERSION)
        manifest = {name: value for name, value in held.manifest.items() if name != "sections"}
        if manifest != self._manifest(index, part):
            raise FormatError("the chunk is of other tokens, or of another model or spec")
        sizes = {SLOTS: sum(self.slot_bytes), SINKS: sum(self._sink_sizes(index))}
        _, *found = [(name, x.dtype, x.end - x.begin) for name, x in held.entries.items()]
        wanted = [(name, torch.uint8, size) for name, size in sizes.items() if size]
        if held.num_sections != 1 or found != wanted:
            raise FormatError("the chunk's tensors are not those of its kind")
        tensors = {name: x.flatten() for name, x in held.tensors(0).items()}
        empty = torch.zeros(0, dtype=torch.uint8, device="cpu")
        exact, dtype = tensors.get(SINKS, empty), self.geometry.dtype
        assert dtype is not None
        if not torch.isfinite(exact.clone().view(dtype)).all():
            raise FormatError("the chunk's exact tokens are not finite")
        return Chunk(tensors.get(SLOTS, empty), exact)

    def _sink_shapes(self, index: int) -> list[tuple[int, ...]]:
        """Return the shapes of a chunk's sinks, of K and V, layer by layer."""
        dims = (self.geometry.head_dim, self.geometry.value_dim)
        first, heads = index * self.size, self.geometry.num_kv_heads
        return [
            (1, heads, min(max(method.sinks - first, 0), self.size), dim)
            for spec in self.specs
            for method, dim in zip((spec.key, spec.value), dims, strict=True)
        ]

    def _sink_sizes(self, index: int) -> list[int]:
        assert self.geometry.dtype is not None
        return [prod(shape) * self.geometry.dtype.itemsize for shape in self._sink_shapes(index)]

    def sinks(self, chunks: Sequence[Tensor]) -> list[Tensor | None]:
        """Return the sinks of K and V, layer by layer; those behind the last chunk are zero."""
        assert self.geometry.dtype is not None
        parts: list[list[Tensor]] = [[] for _ in range(2 * len(self.specs))]
        for index, chunk in enumerate(chunks):
            split = torch.split(chunk, self._sink_sizes(index))
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


class Prefix(Snapshot):
    """A snapshot of chunks from the first on: sinks, and no window. A file only if one is wanted.

    Made with room for `count` chunks; each may go when it was `put`, as a layer does with `take`.
    """

    def __init__(self, kind: ChunkKind, count: int) -> None:
        self._kind, self._chunks = kind, dict[int, Tensor]()
        self._slots: dict[int, Tensor] = {
            index: outside_heap(count, size) for index, size in enumerate(kind.slot_bytes)
        }

    def put(self, index: int, chunk: Chunk) -> None:
        """Hold the bytes of a chunk."""
        for layer, part in enumerate(torch.split(chunk.slots, self._kind.slot_bytes)):
            self._slots[layer][index] = part
        self._chunks[index] = chunk.sinks

    def end(self, count: int, records: Sequence[RecordState]) -> Self:
        """End behind so many chunks, where the model's other layers hold `records`."""
        kind, self._records = self._kind, list(records)
        self._sinks = kind.sinks([self._chunks[index] for index in range(count)])
        none = ((i, count * kind.size, x[:0], self._sinks) for i, x in self._slots.items())
        self.manifest = Manifest(
            slots=FORMAT_VERSION,
            geometry=kind.geometry,
            layout="contiguous",
            batch=1,
            page_size=kind.size,
            begin=0,
            pages=count,
            layers=tuple(LayerEntry.of(kind.layer(*given)) for given in none),
            identity=kind.identity,
            token_hash=None,
            records=tuple(map(RecordInfo.of, records)),
        )
        return self

    @cached_property
    def _container(self) -> Container:  # type: ignore[override]
        return self._like(map(self.layer, self._slots), records=self._records)._container

    def layer(self, index: int, first: int = 0, last: int | None = None) -> LayerState:
        """See `Snapshot.layer`."""
        if (first, last) != (0, None):
            return super().layer(index, first, last)
        if index not in self._slots:
            raise SnapshotError("a cache took over what this prefix held; load it again")
        data = self._slots[index][: self.manifest.pages]
        return self._kind.layer(index, self.manifest.tokens, data, self._sinks)

    def take(self, index: int) -> LayerState:
        """See `Snapshot.take`."""
        state = self.layer(index)
        del self._slots[index]
        return state

    def records(self) -> list[RecordState]:
        """See `Snapshot.records`."""
        return self._records
