"""`Snapshot`: the state of a cache as one checked file or buffer."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import pairwise
from os import PathLike
from typing import Any

import torch
from torch import Tensor

from kvpact.callable_package import Told
from kvpact.errors import FormatError, GeometryError, MismatchError, SnapshotError
from kvpact.files import open_regular
from kvpact.formats.base import FORMAT_VERSION
from kvpact.geometry import CacheGeometry
from kvpact.snapshot.container import Columns, Container
from kvpact.snapshot.manifest import (
    LATE,
    VERSIONS,
    LayerEntry,
    Manifest,
    pages_of,
    read_manifest,
)
from kvpact.snapshot.pages import outside_heap, pack_pages, unpack_pages
from kvpact.snapshot.parts import cut, joined, select_rows
from kvpact.snapshot.state import SIDES, CacheState, Identity, LayerState, RecordState, StreamState
from kvpact.snapshot.tensors import (
    PAGES,
    TOKEN_IDS,
    check_tensors,
    exact_tensors,
    read_offset,
    sizes,
    token_hash,
    token_rows,
)

KIND = "kvpact.snapshot"


class Snapshot(Told):
    """The contents of a cache: packed slots as they lay there, exact tokens, and a manifest.

    Made by `cache.snapshot()`, read with `load`, `open` or `from_bytes`, which raise `FormatError`
    where the manifest and the tensors don't fit together.
    """

    def __init__(self, container: Container) -> None:
        if not isinstance(container, Container):
            raise SnapshotError("write: cache.snapshot(), or kvpact.Snapshot.load(path)")
        self._container = container
        self.manifest: Manifest = read_manifest(container.manifest)
        if container.version not in self.manifest.versions:
            text = f"what the manifest speaks of does not fit version {container.version}"
            raise FormatError(text)
        check_tensors(self.manifest, container)

    @classmethod
    def build(
        cls,
        layers: Iterable[LayerState],
        *,
        slots: int = FORMAT_VERSION,
        geometry: CacheGeometry,
        layout: str,
        page_size: int,
        begin: int = 0,
        identity: Identity | None = None,
        token_ids: Tensor | None = None,
        records: Sequence[RecordState] = (),
    ) -> Snapshot:
        """Make a snapshot of each layer's plain state, one at a time; caches call this.

        `begin`: token with which the slots begin; `page_size`: a multiple of every field's unit.
        """
        batches = {record.tensor.shape[record.rows] for record in records}
        entries, exact, parts, sizes = [], list[tuple[str, Tensor | Columns]](), [], []
        for index, layer in enumerate(layers):
            streams = layer.streams or ()
            batches |= {stream.tail.shape[0] for stream in streams}
            entries.append(LayerEntry.of(layer))
            own = exact_tensors(index, layer)
            sizes.append(sum(tensor.nbytes for tensor in own.values()))
            exact += own.items()
            count = pages_of(max((x.packed for x in streams), default=0), begin, page_size)
            parts.append(pack_pages(streams, count, page_size))
        if len(batches) > 1:
            raise GeometryError(f"layers hold batches of unlike size: {sorted(batches)}")
        batch, pages = max(batches, default=0), max((len(part) for part in parts), default=0)
        ids = None if token_ids is None else token_rows(token_ids, batch)
        manifest = Manifest(
            slots=slots,
            geometry=geometry,
            layout=layout,
            batch=batch,
            page_size=page_size,
            begin=begin,
            pages=pages,
            layers=tuple(entries),
            identity=identity or Identity(),
            token_hash=None if ids is None else token_hash(ids),
            records=tuple(replace(x, tensor=x.tensor.to("meta")) for x in records),
        )
        if ids is not None and ids.numel():
            exact.insert(0, (TOKEN_IDS, ids))
        sizes.insert(0, 0 if ids is None else ids.nbytes)
        if records:
            sizes.append(sum(record.tensor.nbytes for record in records))
            exact += [(record.key, record.tensor) for record in records]
        widths = [part.shape[1] for part in parts]
        runs = [(1, sizes), (pages, widths)]
        if pages * sum(widths):
            last = (parts.pop(0) for _ in widths)
            exact.append((PAGES, Columns((pages, sum(widths)), last)))
        return cls(Container.build(KIND, manifest.version, manifest.to_json(), exact, runs))

    @classmethod
    def open(cls, path: str | PathLike[str]) -> Snapshot:
        """Open a file and read its header alone; tensors are read and checked when used.

        Raises
        ------
        FormatError
            It is no snapshot, of an unknown version, or damaged.
        IntegrityError
            The header was changed.
        FileNotFoundError
            There is no such file.
        """
        return cls(Container.open(path, KIND, *VERSIONS))

    @classmethod
    def load(cls, path: str | PathLike[str]) -> Snapshot:
        """Read a file into memory and check all of it; errors as in `open` and `verify`."""
        cls.open(path)
        with os.fdopen(open_regular(path), "rb") as file:
            data = outside_heap(os.fstat(file.fileno()).st_size).numpy().data
            file.readinto(data)
        return cls.from_bytes(data)

    @classmethod
    def from_bytes(cls, data: bytes | bytearray | memoryview) -> Snapshot:
        """Read a buffer and check all of it; errors as in `open` and `verify`."""
        snapshot = cls(Container(data, KIND, *VERSIONS))
        snapshot.verify()
        return snapshot

    def to_bytes(self) -> bytes:
        """Return the whole as bytes."""
        return self._container.to_bytes()

    def save(self, path: str | PathLike[str]) -> None:
        """Write a file (mode 0600): whole, on the disk when this returns, or not at all.

        Raises
        ------
        OSError
            It can't be written; what was there before is there still.
        """
        self._container.save(path)

    def verify(self, progress: Callable[[int, int], None] | None = None) -> None:
        """Check the checksums of everything; `progress(done, total)` is called now and then.

        Raises
        ------
        IntegrityError
            Something was changed.
        """
        self._container.verify(progress)

    def sizes(self) -> dict[str, int]:
        """Return bytes by what they are for; together they are `nbytes`."""
        return sizes(self._container.entries, self.nbytes)

    def to_json(self) -> dict[str, Any]:
        """Return the manifest as it stands in the file."""
        return self._container.manifest

    @property
    def nbytes(self) -> int:
        """Bytes of the whole."""
        return self._container.nbytes

    @property
    def digest(self) -> str:
        """BLAKE2b-256 that covers everything; equal digests are equal snapshots."""
        return self._container.digest

    @property
    def geometry(self) -> CacheGeometry:
        """Shape of K and V."""
        return self.manifest.geometry

    @property
    def tokens(self) -> int:
        """Tokens held by the longest layer."""
        return self.manifest.tokens

    @property
    def token_ids(self) -> Tensor | None:
        """Token ids `[B, T]`, if they were stored."""
        if self.manifest.token_hash is None or TOKEN_IDS not in self._container.entries:
            return None
        return self._container.tensors(0)[TOKEN_IDS].to(torch.int64)

    def require(self, **wanted: str | None) -> None:
        """Raise `MismatchError` unless ``model``, ``adapter``, ``tenant`` are those given."""
        held = self.manifest.identity.to_json()
        for name, value in Identity(**wanted).to_json().items():
            if name in wanted and held[name] != value:
                raise MismatchError(
                    f"the snapshot's {name} is {held[name]!r}, not {value!r}: these tokens would "
                    "have other K and V; compute them again"
                )

    def __repr__(self) -> str:
        m = self.manifest
        return (
            f"Snapshot(tokens={m.tokens}, batch={m.batch}, layers={len(m.layers)}, "
            f"nbytes={self.nbytes})"
        )

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the bytes, which are checked when they are read."""
        return Snapshot.from_bytes, (self.to_bytes(),)

    def layer(self, index: int, first: int = 0, last: int | None = None) -> LayerState:
        """Return a layer's state, of all pages or some; `IntegrityError` where it was changed."""
        m = self.manifest
        if not 0 <= index < len(m.layers):
            raise GeometryError(f"layer {index!r} is not one of 0 ... {len(m.layers) - 1}")
        entry = m.layers[index]
        if entry.streams is None:
            return LayerState(entry.spec, None, None)
        last = m.pages if last is None else last
        paged = 1 + len(m.layers) + bool(m.records)
        if not 0 <= first <= last <= m.pages:
            raise GeometryError(f"pages {first} to {last} are not among {m.pages}")
        exact = self._container.tensors(1 + index)
        data = torch.empty(last - first, m.page_bytes(index), dtype=torch.uint8, device="cpu")
        for page in range(first, last):
            self._container.section(paged + len(m.layers) * page + index, data[page - first])
        rows = (m.batch, m.geometry.num_kv_heads)
        slots = unpack_pages(data, [stream.fields for stream in entry.streams], rows, m.page_size)
        dims = (m.geometry.head_dim, m.geometry.value_dim)
        streams = []
        # Energies of version 3 are of the first tokens, of whose queries nothing learns any more.
        late = self._container.version >= LATE
        for side, stream, held, dim in zip(SIDES, entry.streams, slots, dims, strict=True):
            name = f"layer.{index}.{side}"
            count = 0 if dim else stream.tail
            empty = torch.zeros(*rows, count, dim, dtype=entry.dtype, device="cpu")
            none = empty.new_zeros(*rows, stream.sinks or 0, dim)
            sinks = exact[f"{name}.sinks"] if dim and stream.sinks else none
            streams.append(
                StreamState(
                    stream.fields,
                    held,
                    stream.packed,
                    stream.start,
                    exact.get(f"{name}.tail", empty),
                    sinks if stream.sinks else None,
                    {part: exact[f"{name}.learnt.{part}"] for part in stream.learnt},
                    *read_offset(stream.offset, exact, name),
                    exact.get(f"{name}.query_energy") if late else None,
                )
            )
        return LayerState(entry.spec, (streams[0], streams[1]), entry.padding)

    def state(self) -> CacheState:
        """Return what caches restore, to be read layer by layer. Raises `FormatError` of a part."""
        m = self.manifest
        if m.slots != FORMAT_VERSION:
            raise FormatError(f"slots of version {m.slots}; this version reads {FORMAT_VERSION}")
        if m.begin:
            raise FormatError(f"a part that begins with token {m.begin}; join it with those before")
        layers = map(self.layer, range(self.num_layers))
        return CacheState(m.geometry, m.batch, m.tokens, layers, self.records())

    def records(self) -> list[RecordState]:
        """Return windows and states of a model's other layers; `IntegrityError` as of `layer`."""
        m = self.manifest
        held = self._container.tensors(1 + len(m.layers)) if m.records else {}
        return [replace(record, tensor=held[record.key]) for record in m.records]

    def select(self, rows: Sequence[int]) -> Snapshot:
        """Return a snapshot of these rows of the batch, in this order; without token ids."""
        states = (select_rows(self.layer(i), rows) for i in range(self.num_layers))
        index = torch.tensor(list(rows), dtype=torch.int64, device="cpu")
        records = [
            replace(record, tensor=record.tensor.index_select(record.rows, index))
            for record in self.records()
        ]
        return self._like(states, records=records)

    def slice(self, start: int, end: int | None = None) -> Snapshot:
        """Return the tokens `start <= t < end` as a snapshot of their own.

        Only their pages are read. What begins with token 0 can be restored as it is: a prefix,
        with its sinks and an empty window, as if it had been cut there. What begins later is a
        part, to be put together again with `join`.

        Parameters
        ----------
        start : int
            A multiple of the file's page size.
        end : int, optional
            A multiple of the page size, with all tokens before it packed; if omitted, everything
            to the end comes along, window included.

        Raises
        ------
        GeometryError
            The tokens can't be cut there.
        """
        m = self.manifest
        if m.records:
            raise GeometryError(
                "the windows and states of a model's other layers stand at one count of tokens: "
                "such a snapshot can't be cut"
            )
        if start < m.begin or start % m.page_size or (end is not None and end % m.page_size):
            raise GeometryError(f"cut at multiples of {m.page_size} tokens, from {m.begin} on")
        packed = min((s.packed for x in m.layers for s in x.streams or ()), default=0)
        if not start <= (start if end is None else end) <= packed:
            raise GeometryError(f"tokens {start} to {end} are not all packed")
        last = m.pages if end is None else (end - m.begin) // m.page_size
        first = (start - m.begin) // m.page_size
        states = (self.layer(i, first, last) for i in range(self.num_layers))
        if end is not None:
            states = (cut(state, end) for state in states)
        ids = self.token_ids if start == m.begin == 0 else None
        return self._like(states, start, None if ids is None else ids[:, :end])

    @classmethod
    def join(cls, parts: Sequence[Snapshot], token_ids: Tensor | None = None) -> Snapshot:
        """Put slices together that follow each other; the last says how it ends.

        Raises
        ------
        GeometryError
            They don't follow each other.
        MismatchError
            They are of unlike caches or identities.
        """
        if not parts:
            raise GeometryError("there is nothing to join")
        for one, other in pairwise(parts):
            a, b = one.manifest, other.manifest
            if a.kind() != b.kind():
                raise MismatchError("the parts are of unlike caches, models or tenants")
            ends = {s.packed for entry in a.layers for s in entry.streams or ()}
            if ends - {b.begin}:
                raise GeometryError(f"a part ends at {ends}, the next begins at {b.begin}")
        states = (joined([p.layer(i) for p in parts]) for i in range(parts[0].num_layers))
        return parts[0]._like(states, parts[0].manifest.begin, token_ids, parts[-1].records())

    def _like(
        self,
        states: Iterable[LayerState],
        begin: int | None = None,
        ids: Tensor | None = None,
        records: Sequence[RecordState] = (),
    ) -> Snapshot:
        m = self.manifest
        return Snapshot.build(
            states,
            slots=m.slots,
            geometry=m.geometry,
            layout=m.layout,
            page_size=m.page_size,
            begin=m.begin if begin is None else begin,
            identity=m.identity,
            token_ids=ids,
            records=records,
        )

    @property
    def num_layers(self) -> int:
        """Layers of the cache."""
        return len(self.manifest.layers)
