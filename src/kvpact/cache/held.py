"""What a layer of a cache holds at one moment, and how it comes to hold something else."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from functools import lru_cache
from itertools import repeat
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from kvpact.cache.append import AppendPlan
from kvpact.cache.step import Step
from kvpact.cache.stream import Stream
from kvpact.contract import AttendConfig
from kvpact.kernels import Plan, RowOffset, StepRunner

if TYPE_CHECKING:
    from kvpact.cache.layer import CacheLayer


class Held(NamedTuple):
    """What a layer holds at one moment.

    Parameters
    ----------
    k, v : Stream or None
        The streams; None while nothing is held.
    padding : Tensor or None
        `[B]` left-padding tokens.
    version : int
        Counts the changes that make views stale.
    plan : Plan or None
        Who computes; None before the first tokens.
    good : Tensor or None
        0-d bool: whether all tokens passed the checks that were deferred; None where none were.
    runner : StepRunner or None
        Carries out the next step at once, if that is like those before.
    """

    k: Stream | None
    v: Stream | None
    padding: Tensor | None
    version: int
    plan: Plan | None = None
    good: Tensor | None = None
    runner: StepRunner | None = None

    @property
    def length(self) -> int:
        """Tokens held."""
        return 0 if self.k is None else self.k.length

    def streams(self) -> list[Stream]:
        """Return the streams, if there are any."""
        return [] if self.k is None or self.v is None else [self.k, self.v]


class LayerPlan(NamedTuple):
    """New tokens of a layer, encoded and not yet stored."""

    before: Held
    after: Held
    appends: list[AppendPlan]
    step: Step
    exact_new: bool


@lru_cache(maxsize=64)
def _first_tokens(batch: int, count: int, device: torch.device) -> Tensor:
    return torch.arange(count, device=device).expand(batch, -1).contiguous()


def sink_positions(stream: Stream, padding: Tensor | None) -> tuple[Tensor | None, int]:
    """Return where each row's sink tokens stand, `[B, S]`, and the position behind the last."""
    if stream.sinks is None:
        return None, 0
    batch, _, sinks, _ = stream.sinks.shape
    if padding is None:
        return _first_tokens(batch, sinks, stream.sinks.device), sinks
    positions = padding.unsqueeze(1) + torch.arange(sinks)
    return positions.to(stream.sinks.device), int(padding.max()) + sinks


def next_padding(held: Held, config: AttendConfig, batch: int) -> Tensor | None:
    """Return the padding with what `config` says of rows that hold no real token yet."""
    if config.padding is None:
        return held.padding
    given, known = config.padding.to("cpu", torch.long), held.padding
    known = torch.zeros(batch, dtype=torch.long) if known is None else known
    open_rows = known >= held.length
    merged = torch.where(open_rows, torch.maximum(given, known), known)
    return merged if merged.any() else None


def next_offset(
    offset: RowOffset, held: Held, config: AttendConfig, padding: Tensor | None
) -> RowOffset:
    """Return the offset of keys with what `config` says of rows that hold no real token yet.

    `padding` is `next_padding`, with which positions begin if nothing else is said.
    """
    given = padding if config.origin is None else config.origin
    origin = None if given is None else tuple(given.tolist())
    if held.length:
        if held.padding is None or config.padding is config.origin is None:
            return offset
        before, after = (x or (0,) * len(held.padding) for x in (offset.origin, origin))
        filled = (held.padding < held.length).tolist()
        origin = tuple(b if f else a for f, b, a in zip(filled, before, after, strict=True))
    return RowOffset(offset.offset, origin if origin and any(origin) else None)


def exchange(layers: Sequence[CacheLayer], states: Sequence[Held]) -> None:
    """Let each layer hold its state: all of them, or none.

    That is one call of C, in which no interrupt is delivered: the old states are kept until its
    end, so nothing is freed, and no code of Python runs, in between.
    """
    if len(layers) == 1:
        layers[0]._held = states[0]
        return
    old = [layer._held for layer in layers]
    deque(map(setattr, layers, repeat("_held"), states), maxlen=0)
    del old
