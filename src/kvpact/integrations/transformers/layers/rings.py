"""Snapshots of layers with sliding attention: records from which they continue bit for bit.

Of each row of a batch it is a snapshot of one layer, after the number of its bytes, so that rows
can be chosen among as those of other records.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from math import lcm
from typing import Any

import torch
from torch import Tensor

from kvpact.cache import ContiguousCache
from kvpact.cache.checks import check_fits
from kvpact.cache.layer.layer import CacheLayer
from kvpact.cache.layer.states import layer_state, page_tokens, restored_layer
from kvpact.cache.modes import detached
from kvpact.contract import AttendConfig
from kvpact.errors import FormatError, GeometryError
from kvpact.geometry import CacheGeometry
from kvpact.integrations.transformers.held.shared import SharedState
from kvpact.snapshot import RecordState, Snapshot
from kvpact.snapshot.parts import select_rows, stack_rows
from kvpact.snapshot.state import CacheState
from kvpact.spec import Spec

PACKED_RING = "packed_ring"
_LENGTH = 8


def packed_ring(entry: CacheLayer, geometry: CacheGeometry) -> Tensor:
    """Return the bytes of a layer with such K and V, `[B, n]` uint8."""
    one, state, rows = replace(geometry, num_layers=1), layer_state(entry), list[bytes]()
    size, layout = page_tokens([entry.spec], one, None), ContiguousCache.layout
    for row in range(0 if state.streams is None else len(state.streams[0].tail)):
        held = [select_rows(state, [row])]
        rows.append(Snapshot.build(held, geometry=one, layout=layout, page_size=size).to_bytes())
    size = max(map(len, rows))
    data = b"".join(len(x).to_bytes(_LENGTH, "little") + x.ljust(size, b"\0") for x in rows)
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).view(len(rows), -1)


def _rows(tensor: Tensor) -> list[Snapshot]:
    """Return the snapshots of the rows of a `packed_ring`, checked."""
    rows = []
    for row in tensor.contiguous().numpy():
        data = row.tobytes()
        end = _LENGTH + int.from_bytes(data[:_LENGTH], "little")
        if end > len(data) or any(data[end:]):
            raise FormatError("the snapshot's packed ring is longer than its bytes, or shorter")
        rows.append(Snapshot.from_bytes(data[_LENGTH:end]))
    return rows


def ring_spec(records: Iterable[RecordState]) -> Spec | None:
    """Return the spec that packs the windows of a snapshot; None where none is packed."""
    found = (x.tensor for x in records if x.name == PACKED_RING)
    return next((Spec.from_json(_rows(x)[0].manifest.layers[0].spec) for x in found), None)


@detached
def restored_rings(
    shared: SharedState,
    numbers: Sequence[int],
    records: Sequence[RecordState],
    tokens: int,
    device: Any,
) -> ContiguousCache | None:
    """Return a cache of all layers that share a window, by records of a snapshot of so many tokens.

    Each layer has a `packed_ring`, or ``keys`` and ``values`` as a whole, which are packed again.
    """
    found = {(record.layer, record.name): record for record in records}
    cache: ContiguousCache | None = None
    for index, number in enumerate(numbers if tokens else ()):
        layer = {n: found.pop((number, n), None) for n in (PACKED_RING, "keys", "values")}
        given = {name: record.tensor for name, record in layer.items() if record is not None}
        for name, record in layer.items():
            if record is not None and (record.rows, record.tokens) != (0, tokens):
                raise GeometryError(f"the snapshot's {name} of layer {number} don't fit the others")
        rows = _rows(given.pop(PACKED_RING)) if PACKED_RING in given else []
        if bool(rows) == bool(given) or len(given) not in (0, 2):
            raise GeometryError(f"the snapshot lacks what the model's layer {number} holds")
        geometry = rows[0].geometry if rows else _geometry(given)
        cache = cache or shared.new_cache(replace(geometry, num_layers=len(numbers)))
        if replace(geometry, num_layers=len(numbers)) != cache.geometry:
            raise GeometryError("layers with sliding attention have K and V of unlike shapes")
        entry = cache.entry(index)
        if rows:
            _restore(entry, [row.state() for row in rows], geometry, device)
        else:
            _pack(entry, given["keys"].to(device), given["values"].to(device), tokens)
        held, window = entry.length, shared.window
        begin = tokens - held
        if begin < 0 or (begin and held < window - 1):
            raise GeometryError(
                f"the snapshot holds {held} tokens of layer {number}, whose window is of {window}"
            )
        entry.restore(entry._held._replace(begin=begin))
    if found:
        raise GeometryError(
            f"the snapshot has {sorted(found)}, which the model's layers don't hold"
        )
    return cache


def _geometry(given: Mapping[str, Tensor]) -> CacheGeometry:
    k, v = given["keys"], given["values"]
    if k.dim() != 4 or v.dim() != 4:
        raise GeometryError("the snapshot's keys and values have no four dimensions")
    return CacheGeometry(1, k.shape[1], k.shape[3], v.shape[3], k.dtype)


def _restore(
    entry: CacheLayer, rows: Sequence[CacheState], geometry: CacheGeometry, device: Any
) -> None:
    for row in rows:
        check_fits(row, geometry)
    state = stack_rows([layer for row in rows for layer in row.layers])
    new = restored_layer(entry.empty(), state, torch.device(device), False, dtype=geometry.dtype)
    entry.restore(new._held)


def _pack(entry: CacheLayer, k: Tensor, v: Tensor, tokens: int) -> None:
    """Store tokens that end at `tokens`, in the segments in which they would lie."""
    streams = entry.new_stream(k, True), entry.new_stream(v, False)
    size = lcm(*(stream.store.segment_tokens for stream in streams))
    more = (tokens - k.shape[2]) % size  # before the window, and so never seen
    k, v = (torch.cat([x[:, :, :1].expand(-1, -1, more, -1), x], 2) for x in (k, v))
    begin = torch.full((len(k),), k.shape[2] - tokens, dtype=torch.int64, device="cpu")
    entry.store(k, v, None, AttendConfig(origin=begin))
