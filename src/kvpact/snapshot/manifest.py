"""The manifest of a snapshot: everything about it but the tensors, checked in all parts."""

from __future__ import annotations

import re
from dataclasses import dataclass
from math import prod
from typing import Any

import torch

from kvpact.geometry import CacheGeometry
from kvpact.snapshot.header import ANY, COUNT, DTYPE_NAMES, DTYPES, SIZE, check, need
from kvpact.snapshot.pages import page_bytes
from kvpact.snapshot.state import (
    SIDES,
    FieldInfo,
    Identity,
    LayerState,
    RecordState,
    StreamState,
    geometry_from_json,
    geometry_json,
)

VERSION, WITH_OFFSETS, WITH_ENERGIES, LATE, WITH_RECORDS = VERSIONS = (1, 2, 3, 4, 5)
"""Of snapshots, of those in which keys lie without their offset, and of those of caches that are
still to learn from their first tokens and have seen queries of these, of those in which tokens wait
in the tail without slots, of those with windows and states of a model's other layers."""
OFFSET_TENSORS = ("offset.bias", "offset.channels", "offset.frequencies")
_DTYPE = frozenset(DTYPES)
_FIELD = {"dtype": _DTYPE, "name": re.compile("(?s).{1,99}"), "shape": [COUNT], "tokens": COUNT}
_STREAM = {
    "fields": SIZE,
    "learnt": [str],
    "packed": SIZE,
    "sinks": (COUNT,),
    "start": SIZE,
    "tail": SIZE,
}
_OFFSET = {"dtype": _DTYPE, "origin": ([ANY],), "scaling": float}
_SOMETIMES = {"offset": _OFFSET, "query_energy": COUNT}
"""Of K alone, where there is such a thing."""
_EMPTY_LAYER = {"spec": SIZE}
_LAYER: dict[str, Any] = {**_EMPTY_LAYER, "dtype": _DTYPE, **dict.fromkeys(SIDES, _STREAM)}
_PADDED_LAYER: dict[str, Any] = {**_LAYER, "padding": SIZE}
_MANIFEST: dict[str, Any] = {
    "batch": SIZE,
    "begin": SIZE,
    "fields": [[_FIELD]],
    "geometry": dict,
    "identity": {"adapter": object, "model": object, "tenant": object},
    "layers": [dict],
    "layout": re.compile("(?s).{0,99}"),
    "paddings": [[SIZE]],
    "page_size": COUNT,
    "pages": SIZE,
    "sections": list,
    "slots": SIZE,
    "specs": [dict],
    "token_hash": (re.compile("(?s).{64}"),),
}

_RECORD = {
    "dtype": _DTYPE,
    "layer": SIZE,
    "name": re.compile(r"[a-z_]{1,60}(\.\d{1,3})?"),
    "rows": SIZE,
    "shape": [COUNT],
    "tokens": SIZE,
}


@dataclass(frozen=True)
class OffsetEntry:
    """The manifest's entry of the offset that keys are stored without (see `StreamState`)."""

    dtype: torch.dtype
    scaling: float
    origin: tuple[int, ...] | None


@dataclass(frozen=True)
class StreamEntry:
    """The manifest's entry of K or V of a layer (see `StreamState`)."""

    fields: tuple[FieldInfo, ...]
    packed: int
    start: int
    tail: int
    sinks: int | None
    learnt: tuple[str, ...]
    offset: OffsetEntry | None = None
    query_energy: int | None = None

    def tensors(self) -> dict[str, int | None]:
        """Return the tensors besides the pages and their tokens, None for those not by token."""
        learnt: dict[str, int | None] = {f"learnt.{part}": None for part in self.learnt}
        if self.offset is not None:
            learnt |= dict.fromkeys(OFFSET_TENSORS)
        by_token = {"query_energy": self.query_energy, "sinks": self.sinks, "tail": self.tail}
        return learnt | {name: tokens for name, tokens in by_token.items() if tokens}

    @classmethod
    def of(cls, stream: StreamState) -> StreamEntry:
        """Return the manifest's entry of a stream."""
        sinks = None if stream.sinks is None else stream.sinks.shape[2]
        learnt, tail = tuple(sorted(stream.learnt)), stream.tail.shape[2]
        offset = None
        if stream.offset is not None:
            offset = OffsetEntry(stream.offset.dtype, stream.offset.scaling, stream.origin)
        energy = None if stream.query_energy is None else stream.query_energy.shape[2]
        return cls(stream.fields, stream.packed, stream.start, tail, sinks, learnt, offset, energy)


@dataclass(frozen=True)
class LayerEntry:
    """The manifest's entry of a layer (see `LayerState`)."""

    spec: dict[str, Any]
    dtype: torch.dtype | None
    padding: tuple[int, ...] | None
    streams: tuple[StreamEntry, StreamEntry] | None

    @classmethod
    def of(cls, layer: LayerState) -> LayerEntry:
        """Return the manifest's entry of a layer."""
        if layer.streams is None:
            return cls(layer.spec, None, layer.padding, None)
        k, v = (StreamEntry.of(stream) for stream in layer.streams)
        return cls(layer.spec, layer.streams[0].tail.dtype, layer.padding, (k, v))

    @property
    def tokens(self) -> int:
        """Tokens held."""
        return max((stream.start + stream.tail for stream in self.streams or ()), default=0)


@dataclass(frozen=True)
class Manifest:
    """All that is known of a snapshot without its tensors; see docs/snapshot-format.md.

    Tensors of `records` are on the device ``meta``.
    """

    slots: int
    geometry: CacheGeometry
    layout: str
    batch: int
    page_size: int
    begin: int
    pages: int
    layers: tuple[LayerEntry, ...]
    identity: Identity
    token_hash: str | None
    records: tuple[RecordState, ...] = ()

    @property
    def version(self) -> int:
        """Version of the file: the first one whose readers know all that is in it."""
        return self.versions[-1]

    @property
    def versions(self) -> tuple[int, ...]:
        """Versions of files in which this may stand, the one that is written last."""
        if self.records:
            return (WITH_RECORDS,)
        streams = [stream for entry in self.layers for stream in entry.streams or ()]
        early = WITH_OFFSETS if any(stream.offset for stream in streams) else VERSION
        early = WITH_ENERGIES if any(stream.query_energy for stream in streams) else early
        late = any(s.query_energy or s.packed < s.start + s.tail for s in streams)
        return (early, LATE) if late else (early,)

    @property
    def tokens(self) -> int:
        """Tokens of the longest layer, or those at which the records stand."""
        records = (record.tokens for record in self.records)
        return max((*(entry.tokens for entry in self.layers), *records), default=0)

    def kind(self) -> tuple[Any, ...]:
        """Return what parts of one snapshot have in common."""
        return (self.slots, self.geometry, self.identity, self.page_size, self.batch)

    def page_bytes(self, layer: int) -> int:
        """Bytes that a layer has in each page."""
        fields = [field for stream in self.layers[layer].streams or () for field in stream.fields]
        return page_bytes(fields, self.batch * self.geometry.num_kv_heads, self.page_size)

    def to_json(self) -> dict[str, Any]:
        """Return JSON-ready data; what layers have in common stands once."""
        shared: dict[str, list[Any]] = {"fields": [], "paddings": [], "specs": []}

        def index(name: str, value: Any) -> int:
            if value not in shared[name]:
                shared[name].append(value)
            return shared[name].index(value)

        layers = []
        for layer in self.layers:
            entry: dict[str, Any] = {"spec": index("specs", layer.spec)}
            if layer.padding is not None:
                entry["padding"] = index("paddings", list(layer.padding))
            if layer.dtype is not None:
                entry["dtype"] = DTYPE_NAMES[layer.dtype]
            for side, stream in zip(SIDES, layer.streams or (), strict=False):
                fields = index("fields", [field.to_json() for field in stream.fields])
                given = {**vars(stream), "fields": fields, "learnt": list(stream.learnt)}
                if (own := stream.offset) is not None:
                    origin, dtype = own.origin and list(own.origin), DTYPE_NAMES[own.dtype]
                    given["offset"] = {"dtype": dtype, "origin": origin, "scaling": own.scaling}
                given = {n: x for n, x in given.items() if x is not None or n not in _SOMETIMES}
                entry[side] = dict(sorted(given.items()))
            layers.append(dict(sorted(entry.items())))
        records = {"records": [record.to_json() for record in self.records]}
        return {
            **{name: value for name, value in vars(self).items() if name != "records"},
            **(records if self.records else {}),
            **shared,
            "geometry": geometry_json(self.geometry),
            "identity": self.identity.to_json(),
            "layers": layers,
        }


def pages_of(packed: int, begin: int, page_size: int) -> int:
    """Return how many pages hold the tokens `begin <= t < packed`."""
    return max(-(-(packed - begin) // page_size), 0)


def read_manifest(data: Any) -> Manifest:
    """Read what `Manifest.to_json` gave (with the container's ``sections``)."""
    wanted = {**_MANIFEST, "records": [_RECORD]} if "records" in data else _MANIFEST
    check(data, wanted, "manifest")
    page_size, who = data["page_size"], data["identity"]
    geometry = geometry_from_json(data["geometry"])
    need(list(who) == list(_MANIFEST["identity"]), "identity")
    need(all(len(row) == data["batch"] for row in data["paddings"]), "paddings")
    need(len(data["layers"]) == geometry.num_layers, "number of layers")
    fields = [_fields(entry, page_size) for entry in data["fields"]]
    layers = tuple(_layer(index, fields, data) for index in range(geometry.num_layers))
    streams = [stream for layer in layers for stream in layer.streams or ()]
    packed = max((stream.packed for stream in streams), default=0)
    need(bool(streams or data.get("records")) == bool(data["batch"]), "batch")
    need(data["begin"] % page_size == 0, "begin")
    need(data["pages"] == pages_of(packed, data["begin"], page_size), "pages")
    records = tuple(_record(entry, data["batch"]) for entry in data.get("records", ()))
    need("records" not in data or bool(records), "records")
    need(len({record.key for record in records}) == len(records), "records")
    given = {**data, "geometry": geometry, "identity": Identity(**who), "layers": layers}
    given["records"] = records
    return Manifest(**{name: given[name] for name in Manifest.__dataclass_fields__})


def _record(entry: dict[str, Any], batch: int) -> RecordState:
    shape, rows = tuple(entry["shape"]), entry["rows"]
    need(rows < len(shape) <= 8 and shape[rows] == batch, "a record's shape")
    need(prod(shape) < 1 << 50, "a record's shape")
    tensor = torch.empty(shape, dtype=DTYPES[entry["dtype"]], device="meta")
    return RecordState(entry["layer"], entry["name"], tensor, rows, entry["tokens"])


def _fields(entry: list[dict[str, Any]], page_size: int) -> tuple[FieldInfo, ...]:
    for field in entry:
        need(list(field) == list(_FIELD), "field")
        need(len(field["shape"]) <= 8, "a field's shape")
        need(page_size % field["tokens"] == 0, "a field's tokens")
    need(len({field["name"] for field in entry}) == len(entry), "fields")
    return tuple(
        FieldInfo(**{**f, "dtype": DTYPES[f["dtype"]], "shape": tuple(f["shape"])}) for f in entry
    )


def _pick(known: list[Any], index: int, what: str) -> Any:
    need(index < len(known), what)
    return known[index]


def _layer(index: int, fields: list[tuple[FieldInfo, ...]], data: dict[str, Any]) -> LayerEntry:
    entry = data["layers"][index]
    held = _PADDED_LAYER if "padding" in entry else _LAYER
    if isinstance(entry.get("k"), dict):
        held = held | {"k": _STREAM | {n: x for n, x in _SOMETIMES.items() if n in entry["k"]}}
    check(entry, _EMPTY_LAYER if len(entry) == 1 else held, f"manifest.layers[{index}]")
    spec, padding = _pick(data["specs"], entry["spec"], "spec"), None
    if len(entry) == 1:
        return LayerEntry(spec, None, None, None)
    if "padding" in entry:
        padding = tuple(_pick(data["paddings"], entry["padding"], "padding"))
    k, v = (_stream(entry[side], fields, data["batch"]) for side in SIDES)
    need(k.start + k.tail == v.start + v.tail, "K and V of unlike length")
    return LayerEntry(spec, DTYPES[entry["dtype"]], padding, (k, v))


def _stream(stream: dict[str, Any], fields: list[tuple[FieldInfo, ...]], batch: int) -> StreamEntry:
    learnt = tuple(stream["learnt"])
    need(list(learnt) == sorted(set(learnt)), "learnt")
    # Every token has slots or is in the tail, or both.
    need(stream["start"] <= stream["packed"] <= stream["start"] + stream["tail"], "packed")
    need(stream.get("query_energy", 0) <= stream["start"] + stream["tail"], "query_energy")
    known = _pick(fields, stream["fields"], "fields")
    offset = None
    if "offset" in stream:
        given, origin = stream["offset"], stream["offset"]["origin"]
        need(origin is None or len(origin) == batch, "origin")
        rows = None if origin is None else tuple(origin)
        offset = OffsetEntry(DTYPES[given["dtype"]], given["scaling"], rows)
    return StreamEntry(**{**stream, "fields": known, "learnt": learnt, "offset": offset})
