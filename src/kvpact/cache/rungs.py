"""What a layer holds, compressed again by the next specs of its ladder (see `ladder`).

The result is defined by this: a stream on a rung is what an empty one of that rung's spec becomes
when it is given all tokens held, decompressed; what its codec learns it takes over from a codec
like its own that has learnt before (`FittedCodec.succeeding`). A call that passes a rung is cut
there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from kvpact.cache.stream import Stream
from kvpact.methods import Codec
from kvpact.methods.context import Context
from kvpact.methods.fitted import FittedCodec
from kvpact.spec import Spec

PIECE = 64
"""Tokens in fp32 that are decompressed at a time; in 16 bits there are twice as many."""

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
    """
    (padding, seen, ahead), (_, first), left, done = known, steps[0], [], []
    for side, (stream, x) in enumerate(zip(pair, new, strict=True)):
        before, queries = (first.value, None) if side else (first.key, seen)
        for length, spec in steps[1:]:
            after = spec.value if side else spec.key
            if after == before:
                continue
            fresh = not stream.length and before.name == "none"  # nothing would be decompressed
            if not fresh and length > stream.length:
                stream, x = _up_to(length, stream, x, padding, queries)
            into = make(stream.memory.tensor, not side, spec=spec)
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
    return with_tokens(first, rest, padding, seen), x[:, :, count:]


def in_pieces(
    stream: Stream, x: Tensor, padding: Tensor | None, seen: Tensor | None
) -> tuple[Stream, Tensor]:
    """Store all but the last new tokens behind others, a few at a time; return what is left.

    An append behind a tail copies its tokens while it encodes them, which have no room at once.
    """
    size = PIECE * 4 // stream.memory.tensor.element_size()
    while stream.length and x.shape[2] > size:
        stream, x = with_tokens(stream, x[:, :, :size], padding, seen), x[:, :, size:]
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
        into = with_tokens(into, x, padding, seen)
    return into


def with_tokens(stream: Stream, x: Tensor, padding: Tensor | None, seen: Tensor | None) -> Stream:
    """Return a stream with new tokens, stored behind all that anybody reads."""
    append = stream.prepare(x, padding, seen)
    append.write()
    return append.after
