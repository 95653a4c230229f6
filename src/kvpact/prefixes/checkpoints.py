"""Checkpoints: the windows and states of a model's other layers at the end of a chunk, as blobs.

Layers that an engine caches itself hold *rings*, the last tokens of K and V, and *states*; neither
can be cut at a token later on. A checkpoint has all states, and of the rings those tokens that the
one before has not: who loads it reads those before it until the rings are full. Rings and keys of
an index are 8-bit integers at rest (`quantizers.channels`), unless all specs store exactly.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from kvpact.errors import FormatError, SnapshotError
from kvpact.prefixes.chunks import ChunkKind
from kvpact.quantizers.channels import GROUP, from_integers, to_integers
from kvpact.snapshot import Container, RecordState, token_hash
from kvpact.stores.base import Blob

KIND = "kvpact.checkpoint"
VERSION = 1
SCALE = ".scale"


@dataclass(frozen=True)
class RecordShape:
    """The properties that all records of one name share, of a batch of one row.

    `tokens`: their axis, None of a state; `kept`: tokens that a ring keeps; `rounded`: if to
    integers.
    """

    layer: int
    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    rows: int
    tokens: int | None = None
    kept: int | None = None
    rounded: bool = False

    @property
    def key(self) -> str:
        """The name of its tensor."""
        return f"{self.layer}.{self.name}"

    def first(self, end: int) -> int:
        """Return the first token that it holds after `end` tokens."""
        return 0 if self.kept is None else max(0, end - self.kept)

    def with_tokens(self, count: int) -> tuple[int, ...]:
        """Return its shape with `count` tokens; a state's has none to count."""
        return tuple(count if axis == self.tokens else n for axis, n in enumerate(self.shape))


@dataclass(frozen=True)
class Checkpoint:
    """The checked contents of a blob: records that begin with token `begin`, as they lay."""

    begin: int
    records: Mapping[str, Tensor]


@dataclass(frozen=True)
class CheckpointKind:
    """The conversion of records to blobs of checkpoints and back; `packed`: rings as integers."""

    chunks: ChunkKind
    shapes: tuple[RecordShape, ...]
    packed: bool

    @cached_property
    def salt(self) -> bytes:
        """A hash of everything on which the bytes of equal tokens depend, except the chunks'."""
        shapes = [{**vars(x), "dtype": str(x.dtype)} for x in self.shapes]
        data = {"format": [KIND, VERSION], "packed": self.packed, "records": shapes}
        return hashlib.blake2b(json.dumps(data, sort_keys=True).encode(), digest_size=32).digest()

    def key(self, chunk: str) -> str:
        """Return the store's key of the checkpoint at the end of a chunk with this key."""
        return hashlib.blake2b(bytes.fromhex(chunk) + self.salt, digest_size=32).hexdigest()

    def begins(self, end: int) -> int:
        """Return the first token that any ring holds after `end` tokens; `end` without rings."""
        return min((x.first(end) for x in self.shapes if x.tokens is not None), default=end)

    def _parts(self, begin: int, end: int) -> list[tuple[RecordShape, int]]:
        """Return each record with the first of its tokens in a checkpoint."""
        return [(x, max(begin, x.first(end))) for x in self.shapes]

    def _stored(self, begin: int, end: int) -> list[tuple[str, torch.dtype, tuple[int, ...]]]:
        """Return name, dtype and shape of a blob's tensors, those without a number left out."""
        found = []
        for shape, first in self._parts(begin, end):
            whole = shape.with_tokens(end - first)
            if not (shape.rounded and self.packed):
                found.append((shape.key, shape.dtype, whole))
            else:
                groups = -(-end // GROUP) - first // GROUP
                found.append((shape.key, torch.int8, whole))
                found.append((shape.key + SCALE, torch.float32, shape.with_tokens(groups)))
        return [(name, dtype, size) for name, dtype, size in found if 0 not in size]

    def _manifest(self, begin: int, end: int, part: Sequence[int]) -> dict[str, Any]:
        return {
            "begin": begin,
            "end": end,
            "kind": (self.chunks.salt + self.salt).hex(),
            "tokens": token_hash(torch.tensor([part], dtype=torch.int64, device="cpu")),
        }

    def pack(self, records: Sequence[RecordState], begin: int, ids: Sequence[int]) -> bytes:
        """Return the blob of records after `ids`, from `begin` on. Raises `SnapshotError`."""
        end, held = len(ids), {f"{x.layer}.{x.name}": x for x in records}
        wanted = {x.key: (x.dtype, x.with_tokens(end - x.first(end))) for x in self.shapes}
        found = {name: (x.tensor.dtype, tuple(x.tensor.shape)) for name, x in held.items()}
        if found != wanted or any(x.tokens != end for x in records):
            odd = sorted(found.items() ^ wanted.items(), key=str)
            raise SnapshotError(
                f"the model's layers hold other records than its first call's: {odd}"
            )
        tensors: dict[str, Tensor] = {}
        for shape, first in self._parts(begin, end):
            tensor, axis, count = held[shape.key].tensor, shape.tokens, end - first
            if axis is not None:
                tensor = tensor.narrow(axis, tensor.shape[axis] - count, count)
                if shape.rounded and self.packed:
                    tensor, tensors[shape.key + SCALE] = to_integers(tensor, axis, first)
            tensors[shape.key] = tensor
        named = [(name, tensors[name]) for name, _, _ in self._stored(begin, end)]
        runs = [(1, [sum(x.nbytes for _, x in named)])]
        manifest = self._manifest(begin, end, ids[-self.chunks.size :])
        return Container.build(KIND, VERSION, manifest, named, runs).to_bytes()

    def unpack(self, blob: Blob, ids: Sequence[int]) -> Checkpoint:
        """Return what a blob of `pack` holds, every byte checked; `ids` as there."""
        held, end = Container(blob, KIND, VERSION), len(ids)
        begin = held.manifest.get("begin")
        if type(begin) is not int or not 0 <= begin < end or begin % self.chunks.size:
            begin = -1  # no manifest says so
        if held.about != self._manifest(begin, end, ids[-self.chunks.size :]):
            raise FormatError("the checkpoint is of other tokens, or of another model or spec")
        _, *found = [(name, x.dtype, x.shape) for name, x in held.entries.items()]
        if held.num_sections != 1 or found != self._stored(begin, end):
            raise FormatError("the checkpoint's tensors are not those of its kind")
        tensors = held.tensors(0)
        for name, tensor in tensors.items():
            if tensor.is_floating_point() and not torch.isfinite(tensor).all():
                raise FormatError(f"{name} of the checkpoint is not finite")
        records = {}
        for shape, first in self._parts(begin, end):
            size = shape.with_tokens(end - first)
            part = tensors.get(shape.key, torch.zeros(size, dtype=shape.dtype, device="cpu"))
            if shape.key + SCALE in tensors and shape.tokens is not None:
                scale = tensors[shape.key + SCALE]
                part = from_integers(part, scale, shape.tokens, first).to(shape.dtype)
            records[shape.key] = part
        return Checkpoint(begin, records)

    def load(self, read: Callable[[int], Blob], ids: Sequence[int]) -> list[RecordState]:
        """Return the records after `ids`; `read` gives blobs. `FormatError`, `IntegrityError`."""
        end = len(ids)
        found = [self.unpack(read(end), ids)]
        while self.begins(end) < (begin := found[-1].begin):
            found.append(self.unpack(read(begin), ids[:begin]))
        states = []
        for shape in self.shapes:
            tensor = found[0].records[shape.key]
            if shape.tokens is not None:
                parts = [x.records[shape.key] for x in reversed(found)]
                whole = torch.cat(parts, shape.tokens) if len(parts) > 1 else tensor
                length, count = whole.shape[shape.tokens], end - shape.first(end)
                tensor = whole.narrow(shape.tokens, length - count, count)
            states.append(RecordState(shape.layer, shape.name, tensor, shape.rows, end))
        return states
