"""The connector's part in vLLM's scheduler: lookups in the store, loads and saves."""

import hashlib
import json
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import wait
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any

from kvpact.cache.paged.sharing import page_keys
from kvpact.integrations.vllm.connector_form import (
    ChunkPiece,
    Load,
    Save,
    StepPlan,
    StoredForm,
    entry_name,
)
from kvpact.integrations.vllm.connector_store import ConnectorCounts, ConnectorOptions, Job, Lane
from kvpact.prefixes.chunks import ChunkKind
from kvpact.snapshot import Identity
from kvpact.stores import Store

AT_ONCE = 0.002
"""Seconds that a lookup may hold up the scheduler; one that takes longer is asked for later."""
RETRY = 30.0
"""Seconds for which a chunk whose load failed is not loaded, unless it is saved again before."""


@dataclass
class _Tracked:
    """The state of a request. `request`: vLLM's, whose tokens grow."""

    request: Any
    kind: ChunkKind
    keys: list[bytes] = field(default_factory=list)
    """The chain, as far as it was needed."""
    names: list[str] = field(default_factory=list)
    """The store's keys, without ranks."""
    lookup: Job | None = None
    deadline: float = 0.0
    found: int | None = None
    """Chunks that the store holds, once that is known."""
    start: int = 0
    """Tokens that the request had when this was asked."""
    saved: int = 0
    """Chunks that need no saving."""
    blocks: list[int] = field(default_factory=list)
    failed: bool = False
    """A load of it failed: all of it is computed."""


class PrefixScheduler:
    """Lookups, and plans of loads and saves; nothing waits for a store, or to be saved."""

    waiting = 0

    def __init__(
        self,
        form: StoredForm,
        options: ConnectorOptions,
        store: Store,
        model: str,
        adapter: Callable[[Any], str | None],
        counts: ConnectorCounts,
        *,
        loads: bool = True,
        saves: bool = True,
    ) -> None:
        self._form, self._options, self._store, self._counts = form, options, store, counts
        self._model, self._adapter = model, adapter
        self._loads_any, self._saves_any = loads, saves
        self.chunk = form.chunk(options.chunk)
        self._kind = cache(partial(form.kind, chunk=self.chunk))
        self._lane = Lane("kvpact-lookup")
        self._tracked: dict[str, _Tracked] = {}
        self._loads: list[Load] = []
        self._loading: dict[str, Load] = {}
        self._unreadable: dict[str, float] = {}
        """Keys that a load failed at, and until when they are taken for missing."""

    def matched(self, request: Any, computed: int) -> tuple[int | None, bool]:
        """Return how many tokens can be loaded after those computed; None while not known."""
        try:
            one = self._of(request)
        except Exception as error:  # an adapter whose files can't be read, for one
            self._counts.say("failures", f"a request has no key ({error})")
            return 0, False
        if one is None or one.failed or not self._loads_any or request.skip_reading_prefix_cache:
            return 0, False
        if one.found is None:
            one.found = self._looked_up(one)
        if one.found is None:
            return None, False
        # At least one token is computed: its logits are the answer.
        most = (request.num_tokens - 1) // self.chunk
        one.start = computed
        more = min(one.found, most) * self.chunk - computed
        return (more, True) if more > 0 else (0, False)

    def allocated(self, request: Any, pages: Sequence[int], loaded: int) -> None:
        """Note a request's pages, and plan the load of so many tokens."""
        one = self._tracked.get(request.request_id)
        if one is None:
            return
        one.blocks = list(pages)
        if one.found is not None:
            one.saved, one.found, one.lookup = max(one.saved, one.found), None, None
        if not loaded:
            return
        first, last = one.start // self.chunk, -(-(one.start + loaded) // self.chunk)
        begin, end = one.start // self._form.page, (one.start + loaded) // self._form.page
        load = Load(
            request.request_id,
            one.kind.identity,
            self._pieces(one, first, last),
            tuple(one.blocks[begin:end]),
            begin - first * self.chunk // self._form.page,
        )
        self._loads.append(load)
        self._loading[request.request_id] = load

    def plan(self, output: Any) -> StepPlan:
        """Return the workers' jobs of a step, given vLLM's `SchedulerOutput`."""
        saves: list[Save] = []
        for new in output.scheduled_new_reqs:
            one = self._tracked.get(new.req_id)
            if one is not None:
                one.blocks = list(new.block_ids[0])
                saves += self._completed(one, new.num_computed_tokens, output)
        cached = output.scheduled_cached_reqs
        for i, name in enumerate(cached.req_ids):
            one = self._tracked.get(name)
            if one is not None:
                given = cached.new_block_ids[i]
                fresh = list(given[0]) if given is not None else []
                resumed = name in cached.resumed_req_ids
                one.blocks = fresh if resumed else one.blocks + fresh
                saves += self._completed(one, cached.num_computed_tokens[i], output)
        loads, self._loads = self._loads, []
        idle = not output.total_num_scheduled_tokens
        if idle and not loads and self._waits():
            self._lane.wait()
        return StepPlan(loads, saves, idle=idle)

    def came_back(self, loaded: Iterable[str], failed: Iterable[int]) -> None:
        """Note loads that ended, and pages that failed."""
        bad = set(failed)
        for name, load in self._loading.items():
            place = next((i for i, page in enumerate(load.pages) if page in bad), None)
            one = self._tracked.get(name)
            if place is None or one is None or one.failed:
                continue
            # Not asked for again: a store may affirm for ever what it can't give.
            one.failed = True
            index = (load.skip + place) * self._form.page // self.chunk
            one.saved = load.pieces[index].index
            self._unreadable[load.pieces[index].key] = time.monotonic() + RETRY
        for name in loaded:
            self._loading.pop(name, None)

    def finished(self, request: Any) -> None:
        """Forget a request."""
        one = self._tracked.pop(request.request_id, None)
        if one is not None and one.lookup is not None:
            one.lookup.stopped = True

    def close(self) -> None:
        """Let the thread end."""
        self._lane.close(0)

    def _of(self, request: Any) -> _Tracked | None:
        one = self._tracked.get(request.request_id)
        if one is None and request.prompt_embeds is None:
            tenant = json.dumps([self._options.tenant, request.cache_salt])
            digest = hashlib.blake2b(tenant.encode(), digest_size=32).hexdigest()
            identity = Identity(model=self._model, adapter=self._adapter(request), tenant=digest)
            one = self._tracked[request.request_id] = _Tracked(request, self._kind(identity))
        return one

    def _waits(self) -> bool:
        lookups = [one.lookup for one in self._tracked.values() if one.lookup is not None]
        return bool(lookups) and not any(job.done() for job in lookups)

    def _looked_up(self, one: _Tracked) -> int | None:
        if one.lookup is None:
            if self._lane.stuck(self._options.timeout):
                self._counts.say("timeouts", f"a lookup waits for {self._store!r} without end")
                return 0
            names = self._names(one, (one.request.num_tokens - 1) // self.chunk)
            names = self._trusted(names)
            one.lookup = self._lane.submit(lambda job: self._look(job, names))
            one.deadline = time.monotonic() + self._options.timeout
            wait([one.lookup], min(AT_ONCE, self._options.timeout))
        if one.lookup.done():
            if (error := one.lookup.exception()) is not None:
                self._counts.say("failures", f"a lookup in {self._store!r} failed ({error})")
        elif time.monotonic() < one.deadline:
            return None
        else:
            one.lookup.stopped = True
            self._counts.say(
                "timeouts", f"a lookup in {self._store!r} took {self._options.timeout} s"
            )
        return one.lookup.progress

    def _trusted(self, names: Sequence[str]) -> list[str]:
        now = time.monotonic()
        self._unreadable = {name: end for name, end in self._unreadable.items() if now < end}
        place = next((i for i, name in enumerate(names) if name in self._unreadable), len(names))
        return list(names[:place])

    def _look(self, job: Job, names: Sequence[str]) -> None:
        for name in names:
            ranks = range(self._form.ranks)
            if job.stopped:
                return
            if not all(self._store.contains(entry_name(name, r, len(ranks))) for r in ranks):
                self._counts.add("misses", len(names) - job.progress)
                return
            job.progress += 1

    def _names(self, one: _Tracked, count: int) -> list[str]:
        """Return the keys of a request's first chunks."""
        known = len(one.keys)
        if count > known:
            ids = one.request.all_token_ids[known * self.chunk : count * self.chunk]
            salt = one.keys[-1] if known else one.kind.salt
            one.keys += page_keys(ids, self.chunk, salt)
            one.names += [
                self._name(one.request, i, key) for i, key in enumerate(one.keys[known:], known)
            ]
        return one.names[:count]

    def _name(self, request: Any, index: int, key: bytes) -> str:
        """Return the key of a chunk, given what its tokens show besides their ids."""
        shown = [
            [media.identifier, media.mm_position.offset]
            for media in request.mm_features or ()
            if media.mm_position.offset < (index + 1) * self.chunk
        ]
        if not shown:
            return key.hex()
        return hashlib.blake2b(key + json.dumps(shown).encode(), digest_size=32).hexdigest()

    def _pieces(self, one: _Tracked, first: int, last: int) -> tuple[ChunkPiece, ...]:
        size, ids, names = self.chunk, one.request.all_token_ids, self._names(one, last)
        return tuple(
            ChunkPiece(names[i], i, tuple(ids[i * size : (i + 1) * size]))
            for i in range(first, last)
        )

    def _completed(self, one: _Tracked, computed: int, output: Any) -> list[Save]:
        """Plan to save the chunks of a request that a step completes."""
        end = computed + output.num_scheduled_tokens[one.request.request_id]
        # The newest tokens may not be known yet while their K and V are computed.
        last = min(end, len(one.request.all_token_ids)) // self.chunk
        if not self._saves_any or last <= one.saved:
            return []
        pieces, each = self._pieces(one, one.saved, last), self.chunk // self._form.page
        pages = tuple(one.blocks[one.saved * each : last * each])
        for piece in pieces:
            self._unreadable.pop(piece.key, None)
        one.saved = last
        return [Save(one.kind.identity, pieces, pages)]
