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
from kvpact.kernels import Plan, StepRunner

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
