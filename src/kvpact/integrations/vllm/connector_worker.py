"""The connector's part in vLLM's worker: pages into the store, chunks into pages."""

import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial

import torch
from torch import Tensor

from kvpact.errors import FormatError, IntegrityError, KVPactError, StoreError, StoreFull
from kvpact.integrations.vllm.connector_form import (
    ChunkPiece,
    Load,
    Save,
    StepPlan,
    StoredForm,
    entry_name,
    of_rank,
)
from kvpact.integrations.vllm.connector_pages import Copied, PackedPages
from kvpact.integrations.vllm.connector_store import ConnectorCounts, ConnectorOptions, Job, Lane
from kvpact.prefixes.chunks import Chunk, ChunkKind
from kvpact.stores import Store

LOADS = 4  # requests whose chunks are read at the same time


@dataclass(frozen=True)
class _Loaded:
    """The result of a load: copies of pages for each layer, and how many chunks and bytes."""

    layers: list[Copied]
    chunks: int
    bytes: int


class PrefixWorker:
    """Loads and saves chunks of one rank. Threads talk to the store, vLLM's touch the pages."""

    def __init__(
        self, form: StoredForm, options: ConnectorOptions, store: Store, counts: ConnectorCounts
    ) -> None:
        self._form, self._options, self._store, self._counts = form, options, store, counts
        self._chunk = form.chunk(options.chunk)
        self._each = self._chunk // form.page
        self._kind = cache(
            lambda identity: form.kind(of_rank(identity, form.rank, form.ranks), self._chunk)
        )
        self._pages: dict[str, PackedPages] = {}
        self._loads_lane = Lane("kvpact-load", LOADS)
        self._saves_lane = Lane("kvpact-save")
        self._running: dict[str, tuple[Load, Job, float]] = {}
        self._failed: set[int] = set()
        self._staged: list[tuple[Save, dict[str, Copied]]] = []
        self._lock = threading.Lock()
        self._queued: dict[str, int] = {}
        """Entries that wait to be saved, and their bytes."""
        self._unreadable: set[str] = set()
        """Entries that the store affirms and gave nothing usable for: they are replaced."""

    def register(
        self,
        pages: Mapping[str, PackedPages],
        loaded: Callable[[Sequence[int]], None],
        damaged: Callable[[Sequence[int]], bool],
    ) -> None:
        """Take the pages of each layer, a callback for loaded ones, and a test for damaged ones."""
        self._pages, self._tell = {name: pages[name] for name in self._form.layers}, loaded
        self._damaged = damaged
        self._page_bytes = sum(x.page_bytes for x in self._pages.values())

    def begin(self, plan: StepPlan) -> None:
        """Accept a step's saves, as many as the queue has room for."""
        accepted = map(self._accepted, plan.saves)
        self._staged = [(save, {}) for save in accepted if save.pieces]

    def start_loads(self, plan: StepPlan) -> None:
        """Begin the loads of a step."""
        begin = time.monotonic()
        for load in plan.loads:
            if self._loads_lane.stuck(self._options.timeout):
                begin = -math.inf  # nobody would come to it
            job = self._loads_lane.submit(partial(self._fetch, load))
            self._running[load.request] = load, job, begin

    def save_layer(self, name: str) -> None:
        """Copy the pages of a layer that a step wrote."""
        self._staged = [one for one in self._staged if self._copied(*one, name)]

    def end(self) -> None:
        """Hand copied pages to the thread that saves them."""
        staged, self._staged = self._staged, []
        for save, layers in staged:
            if self._damaged(save.pages):  # tokens that could not be stored: nobody may load them
                self._counts.say("failures", "chunks hold tokens that can't be stored")
                self._unqueue(save)
                continue
            # Those that are missing: vLLM did not say when it wrote them.
            missing = [name for name in self._pages if name not in layers]
            if all(self._copied(save, layers, name) for name in missing):
                self._saves_lane.submit(partial(self._put, save, layers))
                self._counts.note("waiting_chunks", self.waiting)

    def loaded(self, plan: StepPlan) -> set[str]:
        """Return the requests whose loads have ended; what failed is in `failed_pages`."""
        if plan.idle and self._running and not self._ready():
            self._loads_lane.wait()
        ready = self._ready()
        for name in ready:
            load, job, begin = self._running.pop(name)
            usable = self._take(load, job)
            if usable:
                self._counts.note("load_time_seconds", time.monotonic() - begin)
            self._failed.update(load.pages[usable:])
            self._counts.add("loaded_tokens", usable * self._form.page)
            lost = (len(load.pages) - usable) * self._form.page
            if lost:
                self._counts.say("recomputed_tokens", f"{lost} tokens are computed again", lost)
        return set(ready)

    def failed_pages(self) -> set[int]:
        """Return the pages whose load failed since the last call."""
        failed, self._failed = self._failed, set()
        return failed

    @property
    def waiting(self) -> int:
        """Entries that wait to be saved."""
        with self._lock:
            return len(self._queued)

    def close(self) -> None:
        """Save what waits, within the timeout."""
        self._loads_lane.close(0)
        if not self._saves_lane.close(self._options.timeout):
            with self._lock:
                self._counts.add("dropped", len(self._queued))

    def _copied(self, save: Save, layers: dict[str, Copied], name: str) -> bool:
        """Copy a layer's pages; return whether that worked, and drop the save if not."""
        try:
            layers[name] = self._pages[name].copy(save.pages)
        except (RuntimeError, MemoryError) as error:  # there is no memory for copies
            self._counts.say("dropped", f"chunks were not copied ({error})", len(save.pieces))
            self._unqueue(save)
            return False
        return True

    def _ready(self) -> list[str]:
        now = time.monotonic()
        return [
            name
            for name, (_, job, begin) in self._running.items()
            if job.done() or now > begin + self._options.timeout
        ]

    def _take(self, load: Load, job: Job) -> int:
        """Write the chunks of a load, and return how many of its pages hold tokens now."""
        if not job.done():
            job.stopped = True
            what = f"{self._entry(load.pieces[0])} and what follows from {self._store!r}"
            self._counts.say("timeouts", f"to load {what} took over {self._options.timeout} s")
            return 0
        if (error := job.exception()) is not None or job.result() is None:
            self._counts.say("failures", f"a load from {self._store!r} failed ({error})")
            return 0
        loaded: _Loaded = job.result()
        count = min(max(loaded.chunks * self._each - load.skip, 0), len(load.pages))
        pages = load.pages[:count]
        if pages:
            try:
                for layer, copied in zip(self._pages.values(), loaded.layers, strict=True):
                    layer.paste(pages, copied, load.skip)
            except (RuntimeError, MemoryError) as error:
                self._counts.say("failures", f"a load was not written ({error})")
                count = 0
            self._tell(pages)  # whatever is in them now, it is not what was
        if count:
            self._counts.add("loaded_chunks", loaded.chunks)
            self._counts.add("loaded_bytes", loaded.bytes)
        return count

    def _entry(self, piece: ChunkPiece) -> str:
        return entry_name(piece.key, self._form.rank, self._form.ranks)

    def _fetch(self, load: Load, job: Job) -> _Loaded | None:
        """Read chunks, the last one first: then the first ones are the latest that were used."""
        kind, size = self._kind(load.identity), 0
        found: list[Tensor] = []
        for piece in reversed(load.pieces):
            if job.stopped:
                return None
            read = self._read(kind, piece)
            if read is None:
                self._unreadable.add(self._entry(piece))
                found, size = [], 0  # what follows is of no use without it
            else:
                found.append(read[0].slots)
                size += read[1]
        if not found:
            return _Loaded([], 0, 0)
        slots = torch.stack(found[::-1])
        layers = zip(self._pages.values(), torch.split(slots, kind.slot_bytes, dim=1), strict=True)
        return _Loaded([x.unpack(part, self._each) for x, part in layers], len(found), size)

    def _read(self, kind: ChunkKind, piece: ChunkPiece) -> tuple[Chunk, int] | None:
        """Return a chunk and its bytes in the store; count why there is none."""
        name = self._entry(piece)
        try:
            blob = self._store.fetch(name)
            if blob is not None:
                return kind.unpack(blob, piece.index, piece.tokens), len(blob)
            self._counts.say("gone", f"{self._store!r} held {name} and does not give it")
        except (FormatError, IntegrityError) as error:
            self._counts.say("damaged", f"{name} of {self._store!r} can't be used ({error})")
            self._store.delete(name)
        except StoreError as error:
            self._counts.say("failures", f"{name} was not loaded ({error})")
        return None

    def _accepted(self, save: Save) -> Save:
        """Return a save without those chunks that wait already, or find no room in the queue."""
        size = self._page_bytes * self._each
        pieces: list[ChunkPiece] = []
        pages: list[int] = []
        with self._lock:
            waiting = sum(self._queued.values())
            for i, piece in enumerate(save.pieces):
                name = self._entry(piece)
                if name in self._queued:
                    continue
                if waiting + size > self._options.queue_bytes:
                    self._counts.add("dropped")
                    continue
                self._queued[name] = size
                waiting += size
                pieces.append(piece)
                pages += save.pages[i * self._each : (i + 1) * self._each]
        return Save(save.identity, tuple(pieces), tuple(pages))

    def _put(self, save: Save, layers: Mapping[str, Copied], job: Job) -> None:
        try:
            packed = [x.pack(layers[name], self._each) for name, x in self._pages.items()]
            kind, sinks = self._kind(save.identity), torch.zeros(0, dtype=torch.uint8, device="cpu")
            for piece, slots in zip(save.pieces, torch.cat(packed, dim=1), strict=True):
                self._put_one(kind, piece, Chunk(slots, sinks))
        except KVPactError as error:  # numbers that the spec of the store can't hold
            self._counts.say("failures", f"chunks were not saved ({error})", len(save.pieces))
        finally:
            self._unqueue(save)

    def _unqueue(self, save: Save) -> None:
        with self._lock:
            for piece in save.pieces:
                self._queued.pop(self._entry(piece), None)

    def _put_one(self, kind: ChunkKind, piece: ChunkPiece, chunk: Chunk) -> None:
        name, begin = self._entry(piece), time.monotonic()
        try:
            if name in self._unreadable or not self._store.contains(name):
                blob = kind.seal(chunk, piece.index, piece.tokens)
                self._store.put(name, blob)
                self._unreadable.discard(name)
                self._counts.add("saved_chunks")
                self._counts.add("saved_bytes", len(blob))
                self._counts.note("save_time_seconds", time.monotonic() - begin)
        except StoreFull as error:
            self._counts.say("dropped", f"{name} was not saved ({error})")
        except Exception as error:  # a third party's store may raise anything
            self._counts.say("failures", f"{name} was not saved in {self._store!r} ({error})")
