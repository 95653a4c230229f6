"""The first tokens of a layer like those of another one, stored in one call of a backend.

The ordinary way (`CacheLayer.prepare`) defines it, and stores the first layer's; what was found out
there about shapes and places holds for the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from kvpact.cache.parts import next_memory
from kvpact.cache.segments import SegmentList
from kvpact.cache.stream import Stream
from kvpact.kernels import Plan, PromptRunner, PromptShape, StreamPlan, surely_stored
from kvpact.methods import Codec


class Side(NamedTuple):
    """K or V behind first tokens.

    How many are packed, where the tail starts, a store for their slots, and the largest magnitude
    that is surely stored.
    """

    packed: int
    start: int
    store: SegmentList
    limit: float

    @classmethod
    def of(cls, stream: Stream) -> Side | None:
        """Return what a stream that holds first tokens has in common with others."""
        if stream.offset is not None or not isinstance(stream.store, SegmentList):
            return None
        limit = surely_stored(stream.plan, stream.memory.tensor.shape[3])
        return cls(stream.packed, stream.tail_start, stream.store.emptied(), limit)

    def stream(
        self, before: Stream, x: Tensor, codec: Codec, plan: StreamPlan, store: SegmentList
    ) -> Stream:
        """Return what an empty stream becomes."""
        memory, spare = next_memory(before.memory, 0, 0, 0, x, self.start)
        count = before.num_sinks
        sinks = x[:, :, :count].clone() if self.start and count else None
        known = codec, before.window, plan, store, self.packed, memory, self.start
        return Stream(*known, x.shape[2], spare, sinks, count)


class Prompt(NamedTuple):
    """What is alike in layers behind first tokens.

    `plan`: before anything is learnt; `runner`: None where nothing is packed.
    """

    k: Side
    v: Side
    plan: Plan
    runner: PromptRunner | None

    @classmethod
    def like(cls, k: Stream, v: Stream, plan: Plan, call: Sequence[Tensor | None]) -> Prompt | None:
        """Return that for layers like one which holds `k` and `v` behind a `call`: k, v and q."""
        sides = Side.of(k), Side.of(v)
        first, second = sides
        if first is None or second is None or k.length < max(k.num_sinks, v.num_sinks):
            return None
        learns = k.plan.before is not None
        if not k.codec.ready and k.length > k.learning[0]:
            return None  # it has queries to remember
        if not (k.packed or v.packed):
            return cls(first, second, plan, None)
        if learns and (k.learning[0] < k.num_sinks or k.length < k.learning[1]):
            return None
        x, y, q = call
        assert x is not None and y is not None
        sinks = [stream.num_sinks if stream.codec.group > 1 else 0 for stream in (k, v)]
        shape = PromptShape(
            *(x, y, q if learns else None),
            *((k.packed, v.packed), (sinks[0], sinks[1])),
            *((k.store.source(), v.store.source()), k.learning),
        )
        runner = plan.prompt(shape)
        return None if runner is None else cls(first, second, plan, runner)

    def streams(
        self, before: tuple[Stream, Stream], call: Sequence[Tensor | None], sizes: Sequence[float]
    ) -> tuple[Stream, Stream] | None:
        """Return what another layer's empty streams become; None: the ordinary way decides."""
        k_side, v_side, plan, runner = self
        (k_before, v_before), (k, v, q) = before, call
        assert k is not None and v is not None
        codec, k_plan = k_before.codec, k_before.plan
        if not (sizes[0] <= k_side.limit and sizes[1] <= v_side.limit):
            return None
        k_store, v_store = k_side.store.filled(), v_side.store.filled()
        if runner is not None:
            learnt = runner.run(k, v, q, (k_store, v_store))
            if learnt is None:
                return None
            plan.count_prompt((k_side.packed > 0) + (v_side.packed > 0), learnt is not codec)
            if learnt is not codec:
                codec, k_plan = learnt, k_plan.for_codec(learnt)
        k_after = k_side.stream(k_before, k, codec, k_plan, k_store)
        return k_after, v_side.stream(v_before, v, v_before.codec, v_before.plan, v_store)
