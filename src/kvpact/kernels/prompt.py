"""The arguments of a backend that stores a layer's first tokens in one call."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

from torch import Tensor

from kvpact.kernels.sources import SegmentSource, Table
from kvpact.methods import Codec


class PromptSide(NamedTuple):
    """K or V of a layer's first tokens, like `x`: counts, and slots as those to come will lie.

    `start`: the first one of the tail; `sinks`: copied ones, `apart` of which count for no group.
    """

    x: Tensor
    packed: int
    start: int
    sinks: int
    apart: int
    source: SegmentSource


Limits = tuple[tuple[float, float], ...]
"""The least and the most that the largest magnitudes of K, V and Q may be."""


class PromptPlace(NamedTuple):
    """The place of K or V: a `table` of zero slots; `tail`, `sinks`: dense `[B, H, n, D]`."""

    table: Table
    tail: Tensor
    sinks: Tensor | None


class PromptRunner(Protocol):
    """Stores first tokens of similar layers, in one call each."""

    def place(self, k: PromptPlace, v: PromptPlace) -> tuple[Codec, Any]:
        """Return K's codec, which is going to learn if it has to, and the `place` of `run`.

        All that lives on is made here, before any layer's tokens come.
        """

    def run(self, place: Any, k: Tensor, v: Tensor, q: Tensor | None) -> bool:
        """Learn, encode and copy; False where what is learnt is no number: nothing is stored."""

    def attend(self, place: Any, call: Any, limits: Limits) -> Tensor | None:
        """Do what `run` does, and attend over an `AttendCall` of new tokens alone.

        None, and nothing is stored, also where a largest magnitude is not within its limits.
        """
