"""Gaps: tokens that a cache counts and no longer holds."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import torch

from kvpact.cache import ContiguousCache
from kvpact.errors import GeometryError, KVPactError
from kvpact.snapshot import RecordState

NAME = "gaps"
"""Of the record in snapshots."""


class Gaps(NamedTuple):
    """Ranges of positions that are gone, ascending, apart.

    A range before `firm` says only how many are gone there, not which.
    """

    ranges: tuple[tuple[int, int], ...] = ()
    firm: int = 0
    odd: bool = False  # as it was before a snapshot, see `CallLog.odd`

    @property
    def gone(self) -> int:
        """Tokens that are counted and not held."""
        return sum(end - begin for begin, end in self.ranges)

    def held(self, position: int) -> int:
        """Return how many tokens are held in front of a position."""
        gone = (min(end, position) - min(begin, position) for begin, end in self.ranges)
        return position - sum(gone)

    def opened(self, begin: int, end: int) -> Gaps:
        """Return these with another range, which may take in or touch some of them."""
        near = [r for r in self.ranges if r[0] <= end and begin <= r[1] and r[1] > self.firm]
        begin, end = min([begin, *(r[0] for r in near)]), max([end, *(r[1] for r in near)])
        apart = [r for r in self.ranges if r not in near]
        return Gaps(tuple(sorted([*apart, (begin, end)])), self.firm)

    def cut(self, length: int) -> Gaps:
        """Return these once the positions from `length` on are forgotten."""
        if length and length < self.firm:
            raise GeometryError(
                f"compact() left {self.firm} positions without places: go back to these, or reset()"
            )
        ranges = ((begin, min(end, length)) for begin, end in self.ranges if begin < length)
        return Gaps(tuple(ranges), min(self.firm, length))

    def check(self, attention: str | None) -> None:
        """Raise `KVPactError` where an attention does not know of gaps."""
        if attention != "kvpact":
            raise KVPactError(
                f"attention {attention!r} does not know of tokens that a cache has dropped: call "
                "model.set_attn_implementation('kvpact')"
            )

    def record(
        self, caches: Sequence[ContiguousCache], tokens: int, odd: bool
    ) -> list[RecordState]:
        """Return the gaps for a snapshot; none where all tokens are held and none is odd."""
        if not self.ranges and not odd:
            return []
        batch = next((cache.batch_size for cache in caches), None) or 1
        numbers = torch.tensor([*self.ranges, (self.firm, odd)], dtype=torch.int64, device="cpu")
        return [RecordState(0, NAME, numbers.repeat(batch, 1, 1), 0, tokens)]


def gaps_of(records: Sequence[RecordState], tokens: int) -> tuple[Gaps, list[RecordState]]:
    """Return gaps and other records of a snapshot at so many tokens; raises `GeometryError`."""
    others = [record for record in records if record.name != NAME]
    found = [record.tensor for record in records if record.name == NAME]
    if not found:
        return Gaps(), others
    numbers = found[0]
    if numbers.dtype != torch.int64 or numbers.dim() != 3 or numbers.shape[2] != 2:
        raise GeometryError("the snapshot's gaps are not ranges of tokens")
    *ranges, (firm, odd) = ((int(a), int(b)) for a, b in numbers[0].tolist())
    ends = [end for pair in ranges for end in pair]
    if (
        not all(a < b for a, b in ranges)
        or any(a > b for a, b in pairwise(ends))
        or (ends and not 0 <= ends[0] <= ends[-1] <= tokens)
        or not 0 <= firm <= tokens
        or not bool((numbers == numbers[:1]).all())
    ):
        raise GeometryError("the snapshot's gaps are not ascending ranges of its tokens")
    return Gaps(tuple(ranges), firm, odd != 0), others
