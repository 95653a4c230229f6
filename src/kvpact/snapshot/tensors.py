"""The tensors of a snapshot beside its pages: token ids, what codecs learnt, exact tokens."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from kvpact.errors import FormatError, GeometryError, KVPactError
from kvpact.key_offset import KeyOffset
from kvpact.snapshot.header import TensorEntry
from kvpact.snapshot.manifest import OFFSET_TENSORS, OffsetEntry, StreamEntry
from kvpact.snapshot.state import SIDES, LayerState


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
            given |= {f"offset.{part}": x for part, x in offset_tensors(stream.offset).items()}
        for part in StreamEntry.of(stream).tensors():
            x = given[part] if part in given else getattr(stream, part)
            found[f"layer.{index}.{side}.{part}"] = x
    return found


def offset_tensors(offset: KeyOffset) -> dict[str, Tensor]:
    """Return a key offset's numbers by the names of their tensors."""
    return {
        "bias": torch.tensor(offset.bias, dtype=torch.float32, device="cpu"),
        "channels": torch.tensor(offset.channels, dtype=torch.int32, device="cpu"),
        "frequencies": torch.tensor(offset.frequencies, dtype=torch.float32, device="cpu"),
    }


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
    """Tell whether both have the same tensors under the same names."""
    return one.keys() == other.keys() and all(torch.equal(x, other[n]) for n, x in one.items())


def sizes(entries: Mapping[str, TensorEntry], total: int) -> dict[str, int]:
    """Return bytes of a snapshot's tensors by what they are for, and of what is around them."""
    found = {"packed slots": 0, "sinks": 0, "window": 0, "learnt": 0, "token ids": 0}
    found |= {"key offsets": 0} if any(".offset." in name for name in entries) else {}
    found |= {"query energies": 0} if any("query_energy" in name for name in entries) else {}
    names = {"sinks": "sinks", "tail": "window", "pages": "packed slots", "token_ids": "token ids"}
    names |= {"query_energy": "query energies"}
    for name, entry in entries.items():
        kind = names.get(name.rpartition(".")[2])
        if ".learnt." in name or ".offset." in name:
            kind = "learnt" if ".learnt." in name else "key offsets"
        if kind is not None:
            found[kind] += entry.end - entry.begin
    return {**found, "header and checksums": total - sum(found.values())}
