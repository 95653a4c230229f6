"""What a layer holds, compressed again by the next specs of its ladder (see `ladder`).

The result is defined by this: a stream on a rung is what an empty one of that rung's spec becomes
when it is given all tokens held, decompressed; what its codec learns it takes over from a codec
like its own that has learnt before. A call that passes a rung is cut there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from kvpact.cache.stream import Stream
from kvpact.methods import Codec
from kvpact.methods.fitted import FittedCodec
from kvpact.spec import Spec

PIECE = 128
"""Tokens that are decompressed at a time."""

Rungs = Sequence[tuple[int, Spec]]
"""From more than so many tokens on, a spec."""
Pair = tuple[Stream, Stream]


class MakeStream(Protocol):
    """Makes an empty stream for K (`key`) or V like `x`."""

    def __call__(
        self, x: Tensor, key: bool, codec: Codec | None = None, spec: Spec | None = None
    ) -> Stream:
        """Return it."""
        ...


def to_learn(rungs: Rungs, keys: Stream, make: MakeStream) -> Stream | None:
    """Return an empty stream of the next rung whose keys learn, where those of now don't."""
    for _, spec in () if keys.codec.learns_from else rungs:
        made = make(keys.memory.tensor, True, spec=spec)
        if made.codec.learns_from:
            return None if made.codec.ready else made
    return None


def climbed(
    steps: Rungs,
    pair: Pair,
    new: tuple[Tensor, Tensor],
    known: tuple[Tensor | None, Tensor | None, Stream | None],
    make: MakeStream,
) -> tuple[Pair, tuple[Tensor, Tensor]]:
    """Store new tokens up to the last step, and take all; return the streams, and what is left.

    `steps`: the spec of now, and those to take; `known`: padding, `Held.seen` and `Held.ahead`.
    What is held now stays as it is.
    """
    (k, v), (padding, seen, ahead), (_, before) = pair, known, steps[0]
    for length, after in steps[1:]:
        count = length - k.length
        if count:
            k = _with(k, new[0][:, :, :count], padding, seen)
            v = _with(v, new[1][:, :, :count], padding, None)
            new = new[0][:, :, count:], new[1][:, :, count:]
        if before.key != after.key:
            into = make(k.memory.tensor, True, spec=after)
            placed = k.offset or (ahead and ahead.offset)
            k = recoded(k, into.from_origin(placed.origin) if placed else into, padding, seen)
        if before.value != after.value:
            v = recoded(v, make(v.memory.tensor, False, spec=after), padding, None)
        before = after
    return (k, v), new


def recoded(stream: Stream, into: Stream, padding: Tensor | None, seen: Tensor | None) -> Stream:
    """Return an empty stream once it was given what another one holds, decompressed."""
    state = stream.codec.state()
    if state and isinstance(into.codec, FittedCodec) and not into.codec.ready:
        codec = into.codec.restore(state)
        store, plan = into.store.made_for(codec), into.plan.for_codec(codec)
        into = into._replace(codec=codec, plan=plan, store=store)
    for start in range(0, stream.length, PIECE):
        x = stream.decoded(start, min(start + PIECE, stream.length), padding)
        into = _with(into, x, padding, seen)
    return into


def _with(stream: Stream, x: Tensor, padding: Tensor | None, seen: Tensor | None) -> Stream:
    """Return a stream with new tokens, stored behind all that anybody reads."""
    append = stream.prepare(x, padding, seen)
    append.write()
    return append.after
