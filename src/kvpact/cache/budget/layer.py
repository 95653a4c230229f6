"""A layer of a cache with a budget: it takes the next specs of its ladder (see `ladder`).

A stream on a rung is what an empty one of that rung's spec becomes when it is given all tokens
held, decompressed; its codec takes over what a codec like it learnt (`FittedCodec.succeeding`).
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from typing import NamedTuple

from torch import Tensor

from kvpact.cache.layer.held import Held, LayerPlan, Pair, Sizes, next_seen, placed
from kvpact.cache.layer.layer import CacheLayer
from kvpact.cache.stream.stream import PIECE, Stream
from kvpact.contract import AttendConfig
from kvpact.errors import BudgetExceeded
from kvpact.methods.context import Context
from kvpact.methods.fitted import FittedCodec
from kvpact.snapshot.state import LayerState
from kvpact.spec import Spec

Rungs = Sequence[tuple[int, Spec]]
"""From more than so many tokens on, a spec."""


class Descent(NamedTuple):
    """The rungs that a layer has left, which a rollback leaves as they are.

    `ahead`: an empty stream of the rung whose codec of K is to learn, while that of now does not.
    """

    rungs: Rungs
    ahead: Stream | None = None


class BudgetLayer(CacheLayer):
    """K and V of one layer, whose specs change with its length.

    `planned`: rungs that the layer's first tokens begin with.
    """

    planned: Rungs = ()

    @property
    def _descent(self) -> Descent:
        found: Descent = self._held.descent or Descent(self.planned or [(0, self._spec)])
        return found

    @property
    def spec(self) -> Spec:
        """The spec by which tokens are stored now."""
        return self._descent.rungs[0][1] if self._held.descent else self._spec

    @property
    def next_rung(self) -> float:
        """Tokens after which the layer takes another spec."""
        rungs = self._descent.rungs
        return rungs[1][0] if len(rungs) > 1 else inf

    def prepare(
        self,
        k: Tensor,
        v: Tensor,
        config: AttendConfig,
        q: Tensor | None = None,
        sizes: Sizes = None,
    ) -> LayerPlan:
        """Encode new tokens, and those held where a rung is passed; the layer stays as it is."""
        rungs, ahead = self._descent
        held, padding, pair = self._begun(k, v, config, sizes, rungs[0][1])
        total, (k_new, v_new) = held.length + k.shape[2], (k, v)
        ahead = ahead or self._to_learn(rungs, pair[0])
        ahead = None if ahead is None else placed(ahead, held, config, padding)
        seen = next_seen(held, ahead or pair[0], k, q)
        if len(rungs) > 1 and total > rungs[1][0]:
            self.clean, sizes = False, None
            last = len([length for length, _ in rungs[1:] if length < total])
            pair, (k_new, v_new) = self._climbed(
                rungs[: last + 1], pair, (k, v), padding, seen, ahead
            )
            rungs, ahead = rungs[last:], None if pair[0].codec.learns_from else ahead
        k_stream, v_stream = pair
        if k_stream.length and k_new.shape[2] > PIECE:
            self.clean, sizes = False, None
            k_stream, k_new = in_pieces(k_stream, k_new, padding, seen)
            v_stream, v_new = in_pieces(v_stream, v_new, padding, None)
        k_size, v_size = (None, None) if sizes is None else sizes[:2]
        k_append = k_stream.prepare(k_new, padding, seen, k_size)
        appends = [k_append, v_stream.prepare(v_new, padding, None, v_size)]
        seen = None if (ahead or k_append.after).codec.ready else seen
        plan = self._planned(held, appends, (k, v), padding, seen, config)
        after = plan.after._replace(descent=Descent(rungs, ahead))
        return plan._replace(after=self.paced(after))

    def paced(self, held: Held, rows: Tensor | None = None) -> Held:
        """Return what is held with the tokens up to which steps only store them."""
        if held.descent is None:
            return held
        rungs, ahead = held.descent
        until = rungs[1][0] if len(rungs) > 1 else inf
        ahead = ahead if held.length else None
        if ahead is not None:
            first, last = ahead.learning  # queries are to be seen
            until = min(until, first) if held.length < last else until
            ahead = ahead if rows is None else ahead.select(rows)
        return held._replace(descent=Descent(rungs, ahead), until=until)

    def restore(self, held: Held) -> None:
        """Hold other streams from now on, whose slots are clean."""
        if held.k is not None and held.descent is not None:
            ahead = self._ahead(held.descent, held.k, held.padding)
            held = self.paced(held._replace(descent=Descent(held.descent.rungs, ahead)))
        super().restore(held)

    def empty(self) -> BudgetLayer:
        """Return a layer like this one that holds nothing."""
        other = super().empty()
        assert isinstance(other, BudgetLayer)
        other.planned = self.planned
        return other

    def learner(self, k: Stream, padding: Tensor | None) -> Stream:
        """Return the stream of keys whose codec is to learn from queries."""
        return self._ahead(self._descent, k, padding) or k

    def _ahead(self, descent: Descent, k: Stream, padding: Tensor | None) -> Stream | None:
        """Return `Descent.ahead` of keys, whose rows begin after their padding."""
        rungs, ahead = descent
        if ahead is None and (ahead := self._to_learn(rungs, k)) is not None and ahead.offset:
            ahead = ahead.from_origin(None if padding is None else tuple(padding.tolist()))
        return ahead

    def knows_positions(self) -> bool:
        """Return whether keys lack, or will lack, something that depends on positions."""
        if self.k is None or super().knows_positions():
            return self.k is not None
        like = self.k.memory.tensor
        made = [self.new_stream(like, True, spec=spec) for _, spec in self._descent.rungs]
        return any(stream.offset is not None for stream in made)

    def go_down(self, tokens: int) -> None:
        """Hold the tokens by the spec of so many: K, then V; after an interrupt perhaps K alone."""
        with self.lock:
            for key in (True, False):
                held, (rungs, ahead) = self._held, self._descent
                passed = [x for x in rungs[1:] if x[0] < tokens]
                if held.k is None or held.v is None or not passed:
                    return
                if not self.clean:
                    self.settle()
                now, last = rungs[0][1], passed[-1][1]
                then = Spec(last.key, now.value) if key else last
                left = [(n, Spec(last.key, spec.value)) for n, spec in passed] if key else []
                none = held.k.memory.tensor[:, :, :0], held.v.memory.tensor[:, :, :0]
                (k, v), _ = self._climbed(
                    [(0, now), (0, then)], (held.k, held.v), none, held.padding, held.seen, ahead
                )
                plan = self.compute.plan(k.plan, v.plan, k.offset is not None, self._latent)
                ahead = None if k.codec.learns_from else ahead
                seen = None if (ahead or k).codec.ready else held.seen
                descent = Descent([(0, then), *left, *rungs[1 + len(passed) :]], ahead)
                self._held = self.paced(
                    held._replace(k=k, v=v, plan=plan, seen=seen, runner=None, descent=descent)
                )

    def _to_learn(self, rungs: Rungs, keys: Stream) -> Stream | None:
        """Return an empty stream of the next rung whose keys learn, where those of now don't."""
        for _, spec in () if keys.codec.learns_from else rungs[1:]:
            made = self.new_stream(keys.memory.tensor, True, spec=spec)
            if made.codec.learns_from:
                return None if made.codec.ready else made
        return None

    def _climbed(
        self,
        steps: Rungs,
        pair: Pair,
        new: tuple[Tensor, Tensor],
        padding: Tensor | None,
        seen: Tensor | None,
        ahead: Stream | None,
    ) -> tuple[Pair, tuple[Tensor, Tensor]]:
        """Store new tokens up to the last of `steps`, take all; return streams and what is left."""
        (_, first), left, done = steps[0], [], []
        for side, (stream, x) in enumerate(zip(pair, new, strict=True)):
            before, queries = (first.value, None) if side else (first.key, seen)
            for length, spec in steps[1:]:
                after = spec.value if side else spec.key
                if after == before:
                    continue
                fresh = not stream.length and before.name == "none"  # nothing would be decompressed
                if not fresh and length > stream.length:
                    stream, x = _up_to(length, stream, x, padding, queries)
                into = self.new_stream(stream.memory.tensor, not side, spec=spec)
                placed = None if side else stream.offset or (ahead and ahead.offset)
                into = into.from_origin(placed.origin) if placed else into
                stream = into if fresh else recoded(stream, into, padding, queries)
                before = after
            if steps[-1][0] > stream.length:
                stream, x = _up_to(steps[-1][0], stream, x, padding, queries)
            done.append(stream)
            left.append(x)
        return (done[0], done[1]), (left[0], left[1])


def _up_to(
    length: int, stream: Stream, x: Tensor, padding: Tensor | None, seen: Tensor | None
) -> tuple[Stream, Tensor]:
    """Return a stream with new tokens up to a length, and the tokens that are left."""
    count = length - stream.length
    first, rest = in_pieces(stream, x[:, :, :count], padding, seen)
    return first.prepare(rest, padding, seen).write(), x[:, :, count:]


def in_pieces(
    stream: Stream, x: Tensor, padding: Tensor | None, seen: Tensor | None
) -> tuple[Stream, Tensor]:
    """Store all but the last new tokens a few at a time (copies have no room); return the rest."""
    size = PIECE * 4 // stream.memory.tensor.element_size()
    while stream.length and x.shape[2] > size:
        stream, x = stream.prepare(x[:, :, :size], padding, seen).write(), x[:, :, size:]
    return stream, x


def recoded(stream: Stream, into: Stream, padding: Tensor | None, seen: Tensor | None) -> Stream:
    """Return an empty stream once it was given what another one holds, decompressed."""
    state, codec = stream.codec.state(), into.codec
    if state and isinstance(codec, FittedCodec) and not codec.ready:

        def first() -> Tensor:
            x = stream.decoded(0, into.codec.learns_from, padding)
            return x if into.offset is None else into.coded(x, 0)

        codec = codec.succeeding(state, first, Context(padding, into.num_sinks))
        store, plan = into.store.made_for(codec), into.plan.for_codec(codec)
        into = into._replace(codec=codec, plan=plan, store=store)
    size = PIECE * 4 // stream.memory.tensor.element_size()
    for start in range(0, stream.length, size):
        x = stream.decoded(start, min(start + size, stream.length), padding)
        into = into.prepare(x, padding, seen).write()
    return into


def put_on_rung(
    index: int,
    layer: BudgetLayer,
    rungs: Sequence[Sequence[Spec]],
    changes: Sequence[tuple[int, Spec]],
    state: LayerState,
) -> None:
    """Put an empty layer on a state's rung, one of `changes` or lower; else `BudgetExceeded`."""
    keys, values = ([getattr(x[index], y) for x in rungs] for y in ("key", "value"))
    held, count = Spec.from_json(state.spec), state.length
    wanted = [spec for tokens, spec in changes if tokens < count or not tokens][-1]
    k, v = keys.index(wanted.key), values.index(wanted.value)
    if held.key not in keys[k:] or held.value not in values[v:]:
        raise BudgetExceeded(
            f"layer {index} of the snapshot holds {count:,} tokens by {str(held)!r}, and the "
            f"budget has {str(wanted)!r} for so many: restore it into a cache with the budget "
            "that it was made with"
        )
    k, v, ladder = keys.index(held.key), values.index(held.value), [(0, held)]
    for tokens, spec in changes:
        k, v = max(k, keys.index(spec.key)), max(v, values.index(spec.value))
        made = Spec(keys[k], values[v])
        if tokens >= count and made != ladder[-1][1]:
            ladder.append((tokens, made))
    layer._held = layer._held._replace(descent=Descent(ladder))
