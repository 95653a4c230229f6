"""Figures of attend.json beside their targets."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

CONTEXTS = (4096, 16384, 65536)
Place = tuple[str, int]  # shape, threads
Figure = Callable[[Place, int], float | None]


class Rows:
    """The rows of attend.json by place, context and candidate."""

    def __init__(self, path: Path) -> None:
        written = json.loads(path.read_text())
        self.about, rows = written["about"], written["rows"]
        self.found = {(r["shape"], r["threads"], r["tokens"], r["candidate"]): r for r in rows}
        self.places = list(dict.fromkeys((r["shape"], r["threads"]) for r in rows))
        self.tokens = sorted({r["tokens"] for r in rows})

    def get(self, name: str, key: str, place: Place, tokens: int) -> float | None:
        """Return one number of a candidate, None where it is not there."""
        return self.found.get((*place, tokens, name), {}).get(key)

    def figure(self, name: str, key: str) -> Figure:
        """Return a candidate's number as a figure."""
        return lambda place, tokens: self.get(name, key, place, tokens)

    def over(self, name: str, other: str) -> Figure:
        """Return one candidate's time over another's."""
        return lambda place, tokens: quotient(
            self.get(name, "ms", place, tokens), self.get(other, "ms", place, tokens)
        )

    def two_threads(self, name: str) -> Figure:
        """Return one thread's time over that of two."""
        return lambda place, tokens: quotient(
            self.get(name, "ms", (place[0], 1), tokens) if place[1] == 2 else None,
            self.get(name, "ms", (place[0], 2), tokens),
        )

    def loses(self, name: str, place: Place) -> list[int]:
        """Return the contexts at which a candidate is slower than the best of torch."""
        ratios = {n: self.get(name, "times_best_torch", place, n) for n in self.tokens}
        return [tokens for tokens, ratio in ratios.items() if ratio is not None and ratio < 1]


def quotient(a: float | None, b: float | None) -> float | None:
    """Return a / b where both are there."""
    return None if a is None or b is None else a / b


@dataclass(frozen=True)
class Line:
    """A figure and what it should be at least (at most, where `most`) at each context.

    Without targets it is only reported.
    """

    title: str
    figure: Figure
    targets: Sequence[float] = ()
    most: bool = False
    contexts: tuple[int, ...] = CONTEXTS

    def cells(self, places: Sequence[Place]) -> list[str]:
        """Return title, target, a cell per place, and whether all targets hold."""
        cells, kept = [], []
        for place in places:
            parts = []
            for index, tokens in enumerate(self.contexts):
                found = self.figure(place, tokens)
                holds = found is None or not self.targets or self._holds(found, index)
                parts.append("-" if found is None else strong(f"{found:.2f}", not holds))
                kept += [holds] if found is not None else []
            cells.append("-" if set(parts) == {"-"} else " / ".join(parts))
        return [self.title, self._target(), *cells, verdict(kept if self.targets else [])]

    def _holds(self, found: float, index: int) -> bool:
        target = self.targets[index]
        return found <= target if self.most else found >= target

    def _target(self) -> str:
        if not self.targets:
            return "reported"
        sign, different = ("<=" if self.most else ">="), dict.fromkeys(self.targets)
        shown = self.targets if len(different) > 1 else list(different)
        return f"{sign} " + " / ".join(f"{target:g}" for target in shown)


def verdict(kept: Sequence[bool]) -> str:
    """Return whether all of it holds, "-" where there is nothing to hold."""
    if not kept:
        return "-"
    return "yes" if all(kept) else f"no ({kept.count(False)} of {len(kept)} miss)"


def strong(text: str, wanted: bool) -> str:
    """Return text, bold if wanted."""
    return f"**{text}**" if wanted else text


def short(tokens: int) -> str:
    """Return a number of tokens as people write it."""
    return f"{tokens // 1024}k" if tokens >= 1024 else str(tokens)
