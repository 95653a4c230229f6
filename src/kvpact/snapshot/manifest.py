"""The manifest of a snapshot: everything about it but the tensors, checked in all parts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch

from kvpact.errors import FormatError
from kvpact.geometry import CacheGeometry
from kvpact.snapshot.header import DTYPE_NAMES, DTYPES
from kvpact.snapshot.state import (
    SIDES,
    FieldInfo,
    Identity,
    LayerState,
    geometry_from_json,
    geometry_json,
)

_MAX = 1 << 40


@dataclass(frozen=True)
class StreamEntry:
    """What the manifest says of K or V of a layer (see `StreamState`)."""

    fields: tuple[FieldInfo, ...]
    packed: int
    start: int
    tail: int
    sinks: int | None
    learnt: tuple[str, ...]

    def page_bytes(self, rows: int, page_size: int) -> int:
        """Bytes of a page, for `rows` = batch x heads."""
        return sum(
            rows * page_size // f.tokens * prod(f.shape) * f.dtype.itemsize for f in self.fields
        )


@dataclass(frozen=True)
class LayerEntry:
    """What the manifest says of a layer (see `LayerState`)."""

    spec: dict[str, Any]
    dtype: torch.dtype | None
    padding: tuple[int, ...] | None
    streams: tuple[StreamEntry, StreamEntry] | None


@dataclass(frozen=True)
class Manifest:
    """All that is known of a snapshot without its tensors.

    Parameters
    ----------
    slots : int
        `FORMAT_VERSION` of the packed slots.
    geometry : CacheGeometry
        Shape of K and V.
    layout : str
        Of the cache that it was taken from; it can be restored into any.
    batch : int
        Rows; 0 if nothing was held.
    page_size : int
        Tokens per page of the file.
    begin : int
        Token with which the pages begin: 0 but for a part.
    pages : int
        Pages of the file.
    layers : tuple of LayerEntry
        Layer by layer.
    identity : Identity
        Model, adapter and tenant.
    token_hash : str or None
        BLAKE2b-256 of the token ids as int64, little-endian, row after row.
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

    @property
    def tokens(self) -> int:
        """Tokens of the longest layer."""
        return max((s.start + s.tail for e in self.layers for s in e.streams or ()), default=0)

    def kind(self) -> tuple[Any, ...]:
        """Return what parts of one snapshot have in common."""
        return (self.slots, self.geometry, self.identity, self.page_size, self.batch)

    def rows(self) -> int:
        """Rows of a field's storage: batch x heads."""
        return self.batch * self.geometry.num_kv_heads

    def page_bytes(self, layer: int) -> int:
        """Bytes that a layer has in each page."""
        streams = self.layers[layer].streams or ()
        return sum(stream.page_bytes(self.rows(), self.page_size) for stream in streams)


def manifest_json(
    layers: Sequence[LayerState],
    *,
    slots: int,
    geometry: CacheGeometry,
    layout: str,
    batch: int,
    page_size: int,
    begin: int,
    pages: int,
    identity: Identity,
    token_hash: str | None,
) -> dict[str, Any]:
    """Return the manifest as JSON-ready data; what layers have in common stands once."""
    specs: list[Any] = []
    fields: list[Any] = []
    paddings: list[Any] = []

    def index(known: list[Any], value: Any) -> int:
        if value not in known:
            known.append(value)
        return known.index(value)

    entries = []
    for layer in layers:
        entry: dict[str, Any] = {"spec": index(specs, layer.spec)}
        if layer.padding is not None:
            entry["padding"] = index(paddings, list(layer.padding))
        if layer.streams is not None:
            entry["dtype"] = DTYPE_NAMES[layer.streams[0].tail.dtype]
            for side, stream in zip(SIDES, layer.streams, strict=True):
                entry[side] = {
                    "fields": index(fields, [field.to_json() for field in stream.fields]),
                    "learnt": sorted(stream.learnt),
                    "packed": stream.packed,
                    "sinks": None if stream.sinks is None else stream.sinks.shape[2],
                    "start": stream.start,
                    "tail": stream.tail.shape[2],
                }
        entries.append(dict(sorted(entry.items())))
    return {
        "batch": batch,
        "begin": begin,
        "fields": fields,
        "geometry": geometry_json(geometry),
        "identity": identity.to_json(),
        "layers": entries,
        "layout": layout,
        "paddings": paddings,
        "page_size": page_size,
        "pages": pages,
        "slots": slots,
        "specs": specs,
        "token_hash": token_hash,
    }


def read_manifest(data: dict[str, Any]) -> Manifest:
    """Read what `manifest_json` gave (with the container's ``sections``).

    Raises
    ------
    FormatError
        A key is missing, unknown, or of the wrong type or size.
    """
    keys = {"batch", "begin", "fields", "geometry", "identity", "layers", "layout", "paddings"}
    keys |= {"page_size", "pages", "slots", "specs", "token_hash", "sections"}
    _need(set(data) == keys, "the manifest's keys")
    geometry, batch = geometry_from_json(data["geometry"]), _number(data, "batch")
    page_size = _number(data, "page_size")
    _need(page_size >= 1, "page_size")
    _need(isinstance(data["layout"], str) and len(data["layout"]) < 100, "layout")
    digest = data["token_hash"]
    _need(digest is None or (isinstance(digest, str) and len(digest) == 64), "token_hash")
    who = data["identity"]
    _need(isinstance(who, dict) and list(who) == ["adapter", "model", "tenant"], "identity")
    specs, paddings = _list(data, "specs"), _list(data, "paddings")
    _need(all(isinstance(spec, dict) for spec in specs), "specs")
    for row in paddings:
        good = isinstance(row, list) and all(type(n) is int and 0 <= n < _MAX for n in row)
        _need(good and len(row) == batch, "paddings")
    fields = [_fields(entry, page_size) for entry in _list(data, "fields")]
    layers = _list(data, "layers")
    _need(len(layers) == geometry.num_layers, "number of layers")
    manifest = Manifest(
        slots=_number(data, "slots"),
        geometry=geometry,
        layout=data["layout"],
        batch=batch,
        page_size=page_size,
        begin=_number(data, "begin"),
        pages=_number(data, "pages"),
        layers=tuple(_layer(entry, specs, fields, paddings) for entry in layers),
        identity=Identity(**who),
        token_hash=digest,
    )
    held = [entry for entry in manifest.layers if entry.streams is not None]
    _need(bool(held) == bool(batch), "batch")
    _need(manifest.begin % page_size == 0, "begin")
    packed = max((stream.packed for entry in held for stream in entry.streams or ()), default=0)
    pages = max(-(-(packed - manifest.begin) // page_size), 0)
    _need(manifest.pages == pages, "pages")
    return manifest


def _need(good: bool, what: str) -> None:
    if not good:
        raise FormatError(f"the manifest is damaged: {what}")


def _number(data: dict[str, Any], name: str) -> int:
    value = data[name]
    _need(type(value) is int and 0 <= value < _MAX, name)
    return int(value)


def _list(data: dict[str, Any], name: str) -> list[Any]:
    _need(isinstance(data[name], list), name)
    return list(data[name])


def _pick(known: list[Any], index: Any, what: str) -> Any:
    _need(type(index) is int and 0 <= index < len(known), what)
    return known[index]


def _fields(entry: Any, page_size: int) -> tuple[FieldInfo, ...]:
    _need(isinstance(entry, list), "fields")
    found = []
    for field in entry:
        _need(isinstance(field, dict), "field")
        _need(list(field) == ["dtype", "name", "shape", "tokens"], "field")
        dtype, name, shape = field["dtype"], field["name"], field["shape"]
        _need(isinstance(dtype, str) and dtype in DTYPES, "a field's dtype")
        _need(isinstance(name, str) and 0 < len(name) < 100, "a field's name")
        good = isinstance(shape, list) and all(type(n) is int and 0 < n < _MAX for n in shape)
        _need(good and len(shape) <= 8, "a field's shape")
        tokens = _number(field, "tokens")
        _need(tokens > 0 and page_size % tokens == 0, "a field's tokens")
        found.append(FieldInfo(name, DTYPES[dtype], tuple(shape), tokens))
    _need(len({field.name for field in found}) == len(found), "fields")
    return tuple(found)


def _layer(entry: Any, specs: list[Any], fields: list[Any], paddings: list[Any]) -> LayerEntry:
    _need(isinstance(entry, dict) and "spec" in entry, "layer")
    spec, padding = _pick(specs, entry["spec"], "spec"), None
    if "padding" in entry:
        padding = tuple(_pick(paddings, entry["padding"], "padding"))
    rest = set(entry) - {"padding", "spec"}
    if not rest:
        _need(padding is None, "padding")
        return LayerEntry(spec, None, None, None)
    _need(rest == {"dtype", *SIDES}, "layer")
    dtype = entry["dtype"]
    _need(isinstance(dtype, str) and dtype in DTYPES, "dtype")
    k, v = (_stream(entry[side], fields) for side in SIDES)
    _need(k.start + k.tail == v.start + v.tail, "K and V of unlike length")
    return LayerEntry(spec, DTYPES[dtype], padding, (k, v))


def _stream(entry: Any, fields: list[Any]) -> StreamEntry:
    keys = {"fields", "learnt", "packed", "sinks", "start", "tail"}
    _need(isinstance(entry, dict) and set(entry) == keys, "stream")
    packed, start, tail = (_number(entry, name) for name in ("packed", "start", "tail"))
    learnt = entry["learnt"]
    _need(isinstance(learnt, list) and all(isinstance(n, str) for n in learnt), "learnt")
    _need(learnt == sorted(set(learnt)), "learnt")
    sinks = entry["sinks"]
    _need(sinks is None or (type(sinks) is int and 0 < sinks < _MAX), "sinks")
    # Every token has slots or is in the tail, or both.
    _need(start <= packed <= start + tail, "packed")
    return StreamEntry(
        _pick(fields, entry["fields"], "fields"), packed, start, tail, sinks, tuple(learnt)
    )
