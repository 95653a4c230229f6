"""The state of a layer at one moment, and what new tokens make of it."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from math import inf
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from kvpact.cache.layer.stored import Step
from kvpact.cache.stream.energies import energies
from kvpact.cache.stream.stream import AppendPlan, Stream
from kvpact.contract import AttendConfig
from kvpact.kernels import KnownByPosition, Plan, RowOffset, StepRunner

Pair = tuple[Stream, Stream]
"""Streams of K and of V."""
Sizes = Sequence[float] | None
"""The largest magnitudes of K and V (see `check_tokens`); None where they are not known."""


class Held(NamedTuple):
    """The state of a layer at one moment.

    - `version`: counts the changes that make views stale.
    - `good`: 0-d bool: whether all tokens passed the deferred checks; None where none were.
    - `seen`: `[B, H_kv, n, D]` uint8 (e5m2): energies of the queries (see `Context`) from the token
      `Stream.learning` on, while the codec of K is to learn from them.
    - `runner`: carries out the next step at once, if that is like those before.
    - `begin`: tokens in front that were dropped; all others are counted from there.
    - `until`: tokens up to which steps only store them.
    - `descent`: what a `BudgetLayer` has left to do; None of any other.
    """

    k: Stream | None = None
    v: Stream | None = None
    padding: Tensor | None = None
    version: int = 0
    plan: Plan | None = None
    good: Tensor | None = None
    seen: Tensor | None = None
    runner: StepRunner | None = None
    begin: int = 0
    until: float = inf
    descent: Any = None

    @property
    def length(self) -> int:
        """Tokens held."""
        return 0 if self.k is None else self.k.length

    def streams(self) -> list[Stream]:
        """Return the streams, if there are any."""
        return [] if self.k is None or self.v is None else [self.k, self.v]


class LayerPlan(NamedTuple):
    """New tokens of a layer, encoded and not yet stored.

    `clean`: whether the layer is once they are; slots cut from a page that others hold, too, wait.
    """

    before: Held
    after: Held
    appends: list[AppendPlan]
    step: Step
    exact_new: bool
    clean: bool


def next_seen(held: Held, stream: Stream, k: Tensor, q: Tensor | None) -> Tensor | None:
    """Return `Held.seen` with what new queries `[B, H_q, new, D]` add to it, for a stream."""
    if stream.codec.ready or not stream.codec.learns_from:
        return None
    seen, (first, last) = held.seen, stream.learning
    length = 0 if held.k is None else held.k.length  # `stream` may be one that is still to come
    known = 0 if seen is None else seen.shape[2]
    start, end = max(first - length, 0), last - length
    # A call without queries ends what is seen.
    if q is None or length + q.shape[2] <= first or end <= 0 or known != max(length - first, 0):
        return seen
    # Queries of latents have the rotated part after what meets K.
    energy = energies(q[:, :, start:end, : k.shape[3]], k.shape[1])
    return energy if seen is None else torch.cat([seen, energy], 2)


def next_padding(held: Held, given: Tensor, batch: int) -> Tensor | None:
    """Return the padding with what is given of rows that hold no real token yet."""
    given, known = given.to("cpu", torch.long), held.padding
    known = torch.zeros(batch, dtype=torch.long, device="cpu") if known is None else known
    merged = torch.where(known >= held.length, torch.maximum(given, known), known)
    return merged if merged.any() else None


def placed(stream: Stream, held: Held, config: AttendConfig, padding: Tensor | None) -> Stream:
    """Return a stream of keys whose offset has what `config` or padding says of new rows."""
    if stream.offset is None:
        return stream
    return stream._replace(offset=next_offset(stream.offset, held, config, padding))


def next_offset(
    offset: KnownByPosition, held: Held, config: AttendConfig, padding: Tensor | None
) -> KnownByPosition:
    """Return the offset of keys with what `config` or padding says of rows without a real token."""
    # A rotation is undone as it was done, whatever it begins with: padding is saved anyway.
    named = config.origin if isinstance(offset, RowOffset) else None
    given = padding if named is None else named
    origin = None if given is None else tuple(given.tolist())
    if held.length:
        if held.padding is None or config.padding is named is None:
            return offset
        before, after = (x or (0,) * len(held.padding) for x in (offset.origin, origin))
        filled = (held.padding < held.length).tolist()
        origin = tuple(b if f else a for f, b, a in zip(filled, before, after, strict=True))
    return offset.begun_at(origin if origin and any(origin) else None)


class Holder(Protocol):
    """A layer."""

    _held: Held


Also = tuple[Any, str, Any]
"""An object, the name of an attribute, and its value."""


def exchange(layers: Sequence[Holder], states: Sequence[Held], also: Sequence[Also] = ()) -> None:
    """Let all layers hold their states, or none: in one call of C no interrupt is delivered."""
    if len(layers) <= 1 and not also:
        for layer, state in zip(layers, states, strict=True):
            layer._held = state
        return
    held = ((layer, "_held", state) for layer, state in zip(layers, states, strict=True))
    owners, names, values = zip(*held, *also, strict=True)
    old = [layer._held for layer in layers]
    deque(map(setattr, owners, names, values), maxlen=0)
    del old
