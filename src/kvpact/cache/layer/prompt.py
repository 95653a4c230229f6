"""The first tokens of a layer like those of another one, stored in one call of a backend.

The ordinary way (`CacheLayer.prepare`) defines it, and stores the first layer's; what the others
will hold is made at once, so that no object that lives on pins what activations leave free.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kvpact.cache.layer.held import Held, LayerPlan, Pair
from kvpact.cache.layer.stored import Step
from kvpact.cache.stream.segments import SegmentList
from kvpact.cache.stream.stream import AppendPlan, Stream
from kvpact.contract import TOO_LARGE, AttendConfig
from kvpact.kernels import (
    AttendCall,
    Compute,
    Plan,
    PromptPlace,
    PromptRunner,
    PromptSide,
    StreamPlan,
    TokenMemory,
    giving_back,
    surely_stored,
)
from kvpact.methods import Codec
from kvpact.methods.scaled import LEAST
from kvpact.spec import Spec

Call = tuple[Tensor, Tensor, Tensor | None]
"""K, V and perhaps queries of first tokens."""
Lock = AbstractContextManager[Any]
Rest = tuple[SegmentList, TokenMemory, Tensor | None]
"""Slots, the tail's memory and sinks."""


def prompt_key(pair: Pair, k: Tensor, v: Tensor, q: Tensor | None) -> Any:
    """Return what first tokens have in common with those of other layers; None: nothing."""
    first, second = pair
    if first.offset is not None or not isinstance(first.store, SegmentList):
        return None
    if first.codec.state() or second.codec.state():
        return None
    queries = None if q is None else (q.shape, q.dtype)
    # Such streams stay in `Compute.empty`, so that their addresses stay theirs.
    return id(first), id(second), k.shape, v.shape, k.dtype, queries


def _kind(*call: Tensor | None) -> list[Any]:
    """Return what calls of one kind have in common."""
    return [(x.shape, x.dtype, x.device, x.layout) if type(x) is Tensor else x for x in call]


class Ready(NamedTuple):
    """The state that a layer will have, without its numbers; `place`: where they go."""

    k: Stream
    v: Stream
    plan: Plan
    place: Any


class LayerSide(NamedTuple):
    """K or V after first tokens: the `empty` stream before, counts, a store like theirs.

    `shape`: of the tail; `limit`: the largest magnitude that is surely stored.
    """

    empty: Stream
    packed: int
    start: int
    store: SegmentList
    shape: tuple[int, ...]
    length: int
    limit: float

    @classmethod
    def of(cls, empty: Stream, held: Stream) -> LayerSide | None:
        """Return what a stream that holds first tokens has in common with others."""
        if held.offset is not None or not isinstance(held.store, SegmentList):
            return None
        batch, heads, _, dim = held.memory.tensor.shape
        start, length = held.tail_start, held.length
        if length < held.num_sinks:
            return None
        limit, shape = surely_stored(held.plan, dim), (batch, heads, length - start, dim)
        return cls(empty, held.packed, start, held.store.emptied(), shape, length, limit)

    def arguments(self, x: Tensor, held: Stream) -> PromptSide:
        """Return a backend's arguments for it, and for tokens like those to come."""
        count = held.num_sinks
        apart = count if held.codec.group > 1 else 0
        sinks = count if self.start else 0
        return PromptSide(x, self.packed, self.start, sinks, apart, held.store.source())

    def place(self) -> tuple[Rest, PromptPlace]:
        """Return what a layer's stream is going to hold, and where its tokens go."""
        like, (batch, heads, _, dim) = self.empty.memory.tensor, self.shape
        store, tail, sinks = self.store.filled(), like.new_empty(self.shape), None
        if self.start and self.empty.num_sinks:
            sinks = like.new_empty(batch, heads, self.empty.num_sinks, dim)
        place = PromptPlace(store.table(), tail, sinks)
        return (store, TokenMemory(tail, self.start), sinks), place

    def stream(self, codec: Codec, plan: StreamPlan, rest: Rest) -> Stream:
        """Return what the empty stream becomes."""
        empty, (store, memory, sinks) = self.empty, rest
        packed, start, length, count = self.packed, self.start, self.length, empty.num_sinks
        return Stream(
            codec, empty.window, plan, store, packed, memory, start, length, 0, sinks, count
        )


class Prompt:
    """The common state of layers after first tokens; so many `layers` are expected."""

    def __init__(
        self,
        sides: tuple[LayerSide, LayerSide],
        plan: Plan,
        runner: PromptRunner,
        layers: int,
        spec: Spec,
        call: Call,
        latent: bool,
    ) -> None:
        self._sides, self._plan, self._runner, self._latent = sides, plan, runner, latent
        self._layers, self._ready, self._lock = layers, list[Ready](), threading.Lock()
        self._spec, self._like = spec, _kind(*call)
        self._config: AttendConfig | None = None  # of calls that `attend` takes
        most = (min(side.limit, torch.finfo(torch.float32).max) for side in sides)
        self._limits = *((LEAST, x) for x in most), (0.0, math.nextafter(TOO_LARGE, 0.0))

    @classmethod
    def like(
        cls,
        before: Pair,
        appends: Sequence[AppendPlan],
        call: Call,
        compute: Compute,
        spec: Spec,
        latent: bool,
    ) -> Prompt | None:
        """Return the prompt of layers like one of a spec that a call's appends fill."""
        k, v = appends[0].after, appends[1].after
        first, second = LayerSide.of(before[0], k), LayerSide.of(before[1], v)
        (x, y, q), learns = call, not before[0].codec.ready
        if first is None or second is None:
            return None
        if learns and not k.codec.ready and k.length > k.learning[0]:
            return None  # it has queries to remember
        if learns and k.codec.ready and (k.learning[0] < k.num_sinks or k.length < k.learning[1]):
            return None
        given = first.arguments(x, k), second.arguments(y, v)
        plan = compute.plan(before[0].plan, before[1].plan, False, latent)
        runner = plan.prompt(given, q if learns and k.codec.ready else None, k.learning)
        layers = compute.layers.get(spec, 1) - 1
        if runner is None:
            return None
        return cls((first, second), plan, runner, layers, spec, call, latent)

    def take(
        self, call: Call, sizes: Sequence[float], held: Held, lock: Lock, config: AttendConfig
    ) -> LayerPlan | None:
        """Store another layer's first tokens; return its plan, or None for the ordinary way."""
        k, v, _ = call
        ready = self._stored(call, sizes)
        if ready is None:
            return None
        plain = config.mask is None and config.exact_new and not self._latent
        self._config = config if plain and k.is_cpu and config.origin is None else None
        after = held._replace(k=ready.k, v=ready.v, plan=ready.plan)
        step = Step(None, k, v, None, lock, ready.plan, self._latent)
        return LayerPlan(held, after, [], step, config.exact_new, True)

    def fits(self, spec: Spec, k: Tensor, v: Tensor, q: Tensor, config: AttendConfig) -> bool:
        """Return whether `attend` takes a layer's first tokens, all but their numbers known."""
        if config is not self._config or type(q) is not Tensor:
            return False
        return (spec is self._spec or spec == self._spec) and _kind(k, v, q) == self._like

    def attend(
        self, held: Held, k: Tensor, v: Tensor, q: Tensor, config: AttendConfig
    ) -> tuple[Held, Tensor] | None:
        """Store first tokens and attend over them, as `take` does and its step, in fewer calls."""
        ready, call = self._next(), AttendCall(None, k, v, q, config)
        output = self._runner.attend(ready.place, call, self._limits)
        if output is None:
            return None
        self._count(ready, attend=1)
        return held._replace(k=ready.k, v=ready.v, plan=ready.plan), output

    def _stored(self, call: Call, sizes: Sequence[float]) -> Ready | None:
        """Return the state with these tokens in it; None, nothing held, for the ordinary way."""
        if any(not size <= side.limit for size, side in zip(sizes, self._sides, strict=False)):
            return None
        ready = self._next()
        if not self._runner.run(ready.place, *call):
            return None
        self._count(ready)
        return ready

    def _next(self) -> Ready:
        """Return the state of one more layer."""
        with self._lock:  # layers may be given to threads
            if not self._ready:
                with giving_back(0):
                    self._ready = [self._made() for _ in range(max(self._layers, 1))]
                self._layers = 0
            return self._ready.pop()

    def _count(self, ready: Ready, **more: int) -> None:
        """Count what a runner did for a layer."""
        k_side, v_side = self._sides
        encoded = (k_side.packed > 0) + (v_side.packed > 0)
        learnt = int(ready.k.codec is not k_side.empty.codec)
        self._plan.count(encode=encoded, learn=learnt, **more)

    def _made(self) -> Ready:
        k_side, v_side = self._sides
        (k_rest, k_place), (v_rest, v_place) = k_side.place(), v_side.place()
        codec, place = self._runner.place(k_place, v_place)
        plan, k_plan, v = self._plan, k_side.empty.plan, v_side.empty
        if codec is not k_side.empty.codec:
            k_plan = k_plan.for_codec(codec)
            plan = plan.after(k_plan)
        k_stream = k_side.stream(codec, k_plan, k_rest)
        return Ready(k_stream, v_side.stream(v.codec, v.plan, v_rest), plan, place)
