"""A safetensors file or buffer whose bytes are all under a checksum, section by section.

The bytes after the table of checksums are cut into *sections*, one after the other; each has a
BLAKE2b-128 in the table, so a section can be read and checked alone. A BLAKE2b-256 over header and
table stands in the header and thus over everything. See docs/snapshot-format.md.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from os import PathLike
from threading import Lock
from typing import Any, Self
from weakref import finalize

import numpy as np
import torch
from torch import Tensor

from kvpact.errors import FormatError, IntegrityError
from kvpact.files import open_regular, write_atomic
from kvpact.snapshot.header import (
    dump_json,
    header_bytes,
    header_length,
    layout,
    parse_header,
    parse_json,
)
from kvpact.snapshot.pages import on_host, outside_heap

TABLE = "checksums"
_SUM = 16
_ROOT_AT = 8 + len('{"__metadata__":{"blake2b":"')
_ZEROS = "0" * 64
Named = Sequence[tuple[str, "Tensor | Columns"]]
Runs = Sequence[tuple[int, Sequence[int]]]


@dataclass(frozen=True)
class _SectionRun:
    """Sections of the same sizes, repeated: the first one's number, where it begins."""

    first: int
    begin: int
    repeat: int
    ends: list[int]


@dataclass(frozen=True)
class Columns:
    """Tensors `[rows or less, n]` uint8 that stand side by side, in a file between zeros."""

    shape: tuple[int, int]
    parts: Iterable[Tensor]
    dtype = torch.uint8

    def write(self, out: Tensor) -> None:
        """Copy them into `[rows * n]` uint8."""
        whole, begin = out.view(self.shape), 0
        for part in self.parts:
            whole[: len(part), begin : begin + part.shape[1]] = part
            begin += part.shape[1]
            del part


def as_bytes(tensor: Tensor) -> Tensor:
    """Return a tensor's bytes, `[n]` uint8 on the CPU."""
    return on_host(tensor).contiguous().flatten().view(torch.uint8)


def _sum(data: Any) -> bytes:
    return hashlib.blake2b(data, digest_size=_SUM).digest()


def _root(head: bytes | bytearray, table: Any) -> str:
    blank = head[:_ROOT_AT] + _ZEROS.encode() + head[_ROOT_AT + 64 :]
    digest = hashlib.blake2b(blank, digest_size=32)
    digest.update(table)
    return digest.hexdigest()


class _File:
    """An open file's bytes, by slices: read, since a mapping kills who reads it once it is cut."""

    def __init__(self, handle: int) -> None:
        self._handle, self._size, self._lock = handle, os.fstat(handle).st_size, Lock()
        finalize(self, os.close, handle)

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, part: slice) -> Any:
        at, end, _ = part.indices(self._size)
        data: Any = torch.empty(end - at, dtype=torch.uint8, device="cpu").numpy()
        while at < end:
            if (count := self._read(data[at - end :], at)) == 0:
                raise IntegrityError(
                    f"the file was cut short to {os.fstat(self._handle).st_size} of {self._size} "
                    "bytes since it was opened: write it again, and reopen it"
                )
            at += count
        return data

    def _read(self, out: Any, at: int) -> int:
        if hasattr(os, "preadv"):
            return os.preadv(self._handle, [out], at)
        with self._lock:
            os.lseek(self._handle, at, os.SEEK_SET)
            data = os.read(self._handle, len(out))
        out[: len(data)] = np.frombuffer(data, dtype=np.uint8)
        return len(data)


class Container:
    """A file's header, its manifest and its sections; header and table alone are read and checked.

    Raises `FormatError` where it is not of format `kind` and `versions`, `IntegrityError` if
    changed.
    """

    def __init__(self, buffer: Any, kind: str, *versions: int) -> None:
        try:
            self.buffer: Any = buffer
            if not isinstance(buffer, _File):
                self.buffer = memoryview(buffer).cast("B")
        except TypeError as error:
            raise FormatError(f"{kind} is read from bytes: {error}") from error
        total = len(self.buffer)
        length = header_length(bytes(self.buffer[:8]), total)
        self._data = 8 + length
        head = bytes(self.buffer[: self._data])
        given, self.entries = parse_header(head[8:], total - self._data)
        known = {str(version): version for version in versions}
        if given.get("format") != kind or given.get("version") not in known:
            named = f"{given.get('format', '')[:40]!r} version {given.get('version', '')[:10]!r}"
            wanted = " and ".join(known)
            raise FormatError(f"this is {named}; {kind!r} version {wanted} can be read")
        self.version = known[given["version"]]
        if set(given) != {"blake2b", "format", "manifest", "version"}:
            raise FormatError("the header's metadata has other keys than it should")
        manifest = parse_json(given["manifest"], "the manifest")
        if not isinstance(manifest, dict) or list(manifest) != sorted(manifest):
            raise FormatError("the manifest should be an object with its keys in order")
        self.manifest: dict[str, Any] = manifest
        self._runs = self._sections()
        table = self.buffer[self._data : self._data + self.entries[TABLE].end]
        self._table = bytes(table)
        self.digest = given["blake2b"]
        if _root(head, self._table) != self.digest:
            raise IntegrityError("header or checksums were changed: the checksum does not match")

    def _sections(self) -> list[_SectionRun]:
        """Return the runs of sections; never as a list of all, which could be long."""
        first = next(iter(self.entries), None)
        if first != TABLE or self.entries[TABLE].dtype != torch.uint8:
            raise FormatError("the first tensor should be the table of checksums")
        table = self.entries[TABLE]
        if any(e.begin == e.end for name, e in self.entries.items() if name != TABLE):
            raise FormatError("a tensor is empty; such tensors are left out")
        runs = self.manifest.get("sections")
        if len(table.shape) != 2 or table.shape[1] != _SUM or not isinstance(runs, list):
            raise FormatError("the table of checksums or the list of sections is damaged")
        sections = size = 0
        found = []
        for run in runs:
            good = isinstance(run, list) and len(run) == 2 and isinstance(run[1], list)
            if not good or any(type(n) is not int or n < 0 for n in (run[0], *run[1])):
                raise FormatError("the list of sections is damaged")
            found.append(_SectionRun(sections, size, run[0], [0, *accumulate(run[1])]))
            sections += run[0] * len(run[1])
            size += run[0] * sum(run[1])
        if sections != table.shape[0]:
            raise FormatError(f"{sections} sections, but {table.shape[0]} checksums")
        if size != len(self.buffer) - self._data - table.end:
            raise FormatError("the sections don't cover the file")
        return found

    @classmethod
    def build(
        cls, kind: str, version: int, manifest: Mapping[str, Any], tensors: Named, runs: Runs
    ) -> Self:
        """Make a container: tensors one by one, cut into sections as `runs` say."""
        count = sum(repeat * len(sizes) for repeat, sizes in runs)
        named: list[tuple[str, torch.dtype, tuple[int, ...]]] = [
            (TABLE, torch.uint8, (count, _SUM))
        ]
        named += [(name, x.dtype, tuple(x.shape)) for name, x in tensors]
        entries = layout(named)
        full = {**manifest, "sections": [[repeat, list(sizes)] for repeat, sizes in runs]}
        metadata = {
            "blake2b": _ZEROS,
            "format": kind,
            "manifest": dump_json(dict(sorted(full.items()))),
            "version": str(version),
        }
        head = header_bytes(metadata, entries)
        total = len(head) + max(entry.end for entry in entries.values())
        whole = outside_heap(total)
        buffer = whole.numpy().data
        buffer[: len(head)] = head
        for name, tensor in tensors:
            begin, end = entries[name].begin, entries[name].end
            out = whole[len(head) + begin : len(head) + end]
            if isinstance(tensor, Columns):
                tensor.write(out)
            else:
                out.copy_(as_bytes(tensor))
        place = len(head) + entries[TABLE].end
        table = bytearray()
        for repeat, sizes in runs:
            for size in list(sizes) * repeat:
                table += _sum(buffer[place : place + size])
                place += size
        buffer[len(head) : len(head) + len(table)] = table
        buffer[_ROOT_AT : _ROOT_AT + 64] = _root(head, table).encode()
        return cls(buffer, kind, version)

    @classmethod
    def open(cls, path: str | PathLike[str], kind: str, *versions: int) -> Self:
        """Open a file, which may be replaced; sections are read and checked when they are used."""
        file = _File(open_regular(path))
        if not len(file):
            raise FormatError(f"{path} is empty")
        try:
            return cls(file, kind, *versions)
        except FormatError as error:
            raise FormatError(f"{path}: {error}") from error

    @property
    def nbytes(self) -> int:
        """Bytes of the whole."""
        return len(self.buffer)

    @property
    def num_sections(self) -> int:
        """Sections in all."""
        return self.entries[TABLE].shape[0]

    def _bounds(self, index: int) -> tuple[int, int]:
        """Return where a section begins and ends in the buffer."""
        run = next(run for run in reversed(self._runs) if run.first <= index and run.ends[1:])
        repeat, inside = divmod(index - run.first, len(run.ends) - 1)
        begin = self._data + self.entries[TABLE].end + run.begin + repeat * run.ends[-1]
        return begin + run.ends[inside], begin + run.ends[inside + 1]

    def section(self, index: int, out: Tensor | None = None) -> Tensor:
        """Return a copy of a section, `[n]` uint8, checked after it was copied, if to `out`."""
        begin, end = self._bounds(index)
        data = self.buffer[begin:end]
        if out is not None or not isinstance(self.buffer, _File):
            room = None if out is None else out.numpy()[: end - begin]
            data = np.concatenate([np.frombuffer(data, dtype=np.uint8)], out=room)
        if _sum(data) != self._table[_SUM * index : _SUM * (index + 1)]:
            raise IntegrityError(f"section {index} was changed: its checksum does not match")
        return torch.from_numpy(data)

    def tensors(self, index: int) -> dict[str, Tensor]:
        """Return the tensors that lie wholly in a section, checked, by name."""
        begin, end = self._bounds(index)
        data, found = self.section(index), {}
        for name, entry in self.entries.items():
            first, last = self._data + entry.begin, self._data + entry.end
            if name != TABLE and begin <= first and last <= end:
                part = data[first - begin : last - begin].clone()
                found[name] = part.view(entry.dtype).view(entry.shape)
        return found

    def all_tensors(self) -> dict[str, Tensor]:
        """Return the tensors of all sections, checked, by name."""
        return {n: x for i in range(self.num_sections) for n, x in self.tensors(i).items()}

    @property
    def about(self) -> dict[str, Any]:
        """The manifest that `build` was given."""
        return {name: value for name, value in self.manifest.items() if name != "sections"}

    def verify(self, progress: Callable[[int, int], None] | None = None) -> None:
        """Check every section and call `progress(done, total)`. Raises `IntegrityError`."""
        for index in range(self.num_sections):
            self.section(index)
            if progress is not None:
                progress(index + 1, self.num_sections)

    def to_bytes(self) -> bytes:
        """Return the whole as bytes."""
        return bytes(self.buffer[:])

    def save(self, path: str | PathLike[str]) -> None:
        """Write a file, whole or not at all; see `write_atomic`."""
        write_atomic(path, self.buffer[:])
