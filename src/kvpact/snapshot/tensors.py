"""The tensors of a snapshot besides its pages: token ids, what codecs learnt, exact tokens."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from kvpact.errors import FormatError, GeometryError, KVPactError
from kvpact.key_offset import KeyOffset
from kvpact.snapshot.container import Container
from kvpact.snapshot.header import DTYPE_NAMES, TensorEntry
from kvpact.snapshot.manifest import LATE, OFFSET_TENSORS, Manifest, OffsetEntry, StreamEntry
from kvpact.snapshot.state import SIDES, LayerState

TOKEN_IDS = "token_ids"
PAGES = "pages"


def token_hash(token_ids: Tensor) -> str:
    """Return the BLAKE2b-256 of token ids: int64, little-endian, row after row."""
    data = token_ids.to("cpu", torch.int64).contiguous().numpy().astype("<i8").tobytes()
    return hashlib.blake2b(data, digest_size=32).hexdigest()


def token_rows(token_ids: Any, batch: int) -> Tensor:
    """Return token ids as `[B, T]`, int32 where they fit; `GeometryError` if they are none."""
    if not isinstance(token_ids, Tensor):
        try:
            token_ids = torch.tensor(token_ids, dtype=torch.int64, device="cpu")
        except (TypeError, ValueError, RuntimeError, OverflowError):
            raise GeometryError("token ids should be whole numbers of 64 bits") from None
    if token_ids.dtype not in (torch.int32, torch.int64) or token_ids.dim() not in (1, 2):
        raise GeometryError("token ids should be integers [T] or [B, T]")
    ids: Tensor = token_ids.detach().to("cpu", torch.int64)
    ids = ids[None] if ids.dim() == 1 else ids
    if ids.shape[0] != batch:
        raise GeometryError(f"token ids have {ids.shape[0]} rows, the cache holds {batch}")
    small = not ids.numel() or (ids.min() >= -(2**31) and ids.max() < 2**31)
    return ids.to(torch.int32) if small else ids


def exact_tensors(index: int, layer: LayerState) -> dict[str, Tensor]:
    """Return a layer's learnt and exact tensors by their names in the file, empty ones left out."""
    found = {}
    for side, stream in zip(SIDES, layer.streams or (), strict=False):
        given = {f"learnt.{part}": x for part, x in stream.learnt.items()}
        for part, x in given.items():
            if not x.numel():
                raise FormatError(f"the codec's state {part!r} is empty")
        if stream.offset is not None:
            numbers = stream.offset.bias, stream.offset.channels, stream.offset.frequencies
            kinds = torch.float32, torch.int32, torch.float32
            for part, own, kind in zip(OFFSET_TENSORS, numbers, kinds, strict=True):
                given[part] = torch.tensor(own, dtype=kind, device="cpu")
        for part in StreamEntry.of(stream).tensors():
            x = given[part] if part in given else getattr(stream, part)
            if x.numel():  # keys that are made of values have a width of 0
                found[f"layer.{index}.{side}.{part}"] = x
    return found


def read_offset(
    entry: OffsetEntry | None, tensors: Mapping[str, Tensor], name: str
) -> tuple[KeyOffset | None, tuple[int, ...] | None]:
    """Return a stream's key offset and its rows' origins out of the tensors of its layer."""
    if entry is None:
        return None, None
    held = {part.partition(".")[2]: tensors[f"{name}.{part}"] for part in OFFSET_TENSORS}
    try:
        given: dict[str, Any] = {**held, "scaling": entry.scaling, "dtype": entry.dtype}
        return KeyOffset(**given), entry.origin
    except KVPactError as error:
        raise FormatError(f"the snapshot's key offset can't be right: {error}") from None


def same_tensors(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> bool:
    """Return whether both have the same tensors under the same names."""
    return one.keys() == other.keys() and all(torch.equal(x, other[n]) for n, x in one.items())


def sizes(entries: Mapping[str, TensorEntry], total: int) -> dict[str, int]:
    """Return bytes of a snapshot's tensors by what they are for, and of what is around them."""
    found = {"packed slots": 0, "sinks": 0, "window": 0, "learnt": 0, "token ids": 0}
    found |= {"key offsets": 0} if any(".offset." in name for name in entries) else {}
    found |= {"query energies": 0} if any("query_energy" in name for name in entries) else {}
    records = [name for name in entries if name.startswith("record.")]
    found |= {"windows and states": 0} if records else {}
    names = {"sinks": "sinks", "tail": "window", "pages": "packed slots", "token_ids": "token ids"}
    names |= {"query_energy": "query energies"}
    for name, entry in entries.items():
        kind = names.get(name.rpartition(".")[2])
        if ".learnt." in name or ".offset." in name:
            kind = "learnt" if ".learnt." in name else "key offsets"
        if name in records:
            kind = "windows and states"
        if kind is not None:
            found[kind] += entry.end - entry.begin
    return {**found, "header and checksums": total - sum(found.values())}


def check_tensors(manifest: Manifest, container: Container) -> None:
    """Raise `FormatError` unless the tensors are exactly those that the manifest speaks of."""
    m, entries, version = manifest, container.entries, container.version
    rest = list(entries)[1:]
    if rest and rest[0] == TOKEN_IDS:
        ids = entries[rest.pop(0)]
        good = len(ids.shape) == 2 and DTYPE_NAMES[ids.dtype] in ("I32", "I64")
        if not good or ids.shape[0] != m.batch or m.token_hash is None:
            raise FormatError("the token ids don't fit the manifest")
    sizes = [entries[TOKEN_IDS].end - entries[TOKEN_IDS].begin if TOKEN_IDS in entries else 0]
    dims = (m.geometry.head_dim, m.geometry.value_dim)
    rows = (m.batch, m.geometry.num_kv_heads)
    for index, layer in enumerate(m.layers):
        sizes.append(0)
        for side, stream, dim in zip(SIDES, layer.streams or (), dims, strict=False):
            for part, count in stream.tensors().items():
                if count is not None and not dim:
                    continue
                tensor = f"layer.{index}.{side}.{part}"
                if not rest or rest.pop(0) != tensor:
                    raise FormatError(f"tensor {tensor!r} is not where it should be")
                found = entries[tensor]
                late = version >= LATE
                energies = torch.uint8 if late else torch.float32
                dtype = energies if part == "query_energy" else layer.dtype
                wanted = (*rows, count, dim), dtype
                if count is not None and (found.shape, found.dtype) != wanted:
                    raise FormatError(f"tensor {tensor!r} has another shape or dtype")
                sizes[-1] += found.end - found.begin
    if m.records:
        sizes.append(0)
    for record in m.records:
        if not rest or rest.pop(0) != record.key:
            raise FormatError(f"tensor {record.key!r} is not where it should be")
        found = entries[record.key]
        if (found.shape, found.dtype) != (tuple(record.tensor.shape), record.tensor.dtype):
            raise FormatError(f"tensor {record.key!r} has another shape or dtype")
        sizes[-1] += found.end - found.begin
    page = [m.page_bytes(index) for index in range(len(m.layers))]
    if sum(page) * m.pages:
        pages = entries.get(rest.pop(0)) if rest == [PAGES] else None
        if pages is None or pages.shape != (m.pages, sum(page)) or pages.dtype != torch.uint8:
            raise FormatError("the pages are not as the manifest says")
    if rest:
        raise FormatError(f"tensor {rest[0]!r} should not be there")
    if container.manifest["sections"] != [[1, sizes], [m.pages, page]]:
        raise FormatError("the sections are not as the manifest says")
