"""What the kernels are held to, and what was measured: one table.

    python benchmarks/attend_lines.py [DIR]

Reads DIR/attend.json, and attend-avx2.json, linearity.json and generate.json where they are there;
writes DIR/lines.md. Cells show 4k / 16k / 64k tokens; what misses its target is bold.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import runner
from attend_linearity import BOUND
from attend_torch import AVX2, NO_BF16
from machine import head

BEST, CAPPED, READ, FP16 = "times_best_torch", "times_best_torch_capped", "over_read", "times_fp16"
CONTEXTS = (4096, 16384, 65536)
Place = tuple[str, int]  # shape, threads
Figure = Callable[[Place, int], float | None]
Cells = list[str]


class Rows:
    """The rows of a file by place, context and candidate."""

    def __init__(self, path: Path) -> None:
        written = json.loads(path.read_text("utf-8"))
        self.about, rows = written["about"], written["rows"]
        self.found = {(r["shape"], r["threads"], r["tokens"], r["candidate"]): r for r in rows}
        self.places = list(dict.fromkeys((r["shape"], r["threads"]) for r in rows))
        self.tokens = sorted({r["tokens"] for r in rows})

    def figure(self, name: str, key: str) -> Figure:
        """Return a candidate's number as a figure, None where it is not there."""
        return lambda place, tokens: self.found.get((*place, tokens, name), {}).get(key)

    def over(self, name: str, other: str) -> Figure:
        """Return one candidate's time over another's."""
        a, b = self.figure(name, "ms"), self.figure(other, "ms")
        return lambda place, tokens: quotient(a(place, tokens), b(place, tokens))

    def two_threads(self, name: str) -> Figure:
        """Return one thread's time over that of two."""
        ms = self.figure(name, "ms")
        return lambda place, tokens: (
            quotient(ms((place[0], 1), tokens), ms(place, tokens)) if place[1] == 2 else None
        )


def quotient(a: float | None, b: float | None) -> float | None:
    """Return a / b where both are there."""
    return None if a is None or b is None else a / b


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


def line(
    places: Sequence[Place], title: str, figure: Figure, targets: Sequence[float] = (),
    most: bool = False,
) -> Cells:  # fmt: skip
    """Return a title, its target, a cell per place, and whether all targets hold.

    A figure should be at least (at most, where `most`) its target at each context, the last ones if
    there are fewer targets; without targets it is only reported.
    """
    cells, kept = [], []
    contexts = CONTEXTS[-len(targets) :] if targets else CONTEXTS
    for place in places:
        parts = []
        for tokens, target in zip(contexts, targets or (None,) * len(contexts), strict=True):
            found = figure(place, tokens)
            if found is None or target is None:
                parts.append("-" if found is None else f"{found:.2f}")
                continue
            kept.append(found <= target if most else found >= target)
            parts.append(strong(f"{found:.2f}", not kept[-1]))
        cells.append("-" if set(parts) == {"-"} else " / ".join(parts))
    shown = targets if len(set(targets)) > 1 else targets[:1]
    wanted = ("<= " if most else ">= ") + " / ".join(f"{target:g}" for target in shown)
    return [title, wanted if targets else "reported", *cells, verdict(kept)]


def attend_lines(rows: Rows) -> list[Cells]:
    """Return the lines over attend.json."""
    figure, over = rows.figure, rows.over
    three = "kivi 4", "kvarn 4", "centred 4"
    lines: list[tuple[Any, ...]] = [
        ("4 bits: times best torch", figure("4 bits", BEST), (6.5, 8, 8)),
        ("4 bits: distance to the read", figure("4 bits", READ), (2.0, 2.0, 1.9), True),
        ("4 bits: times own fused fp16", figure("4 bits", FP16)),
        ("8 bits: times best torch", figure("8 bits", BEST), (4.9,) * 3),
        ("8 bits: distance to the read", figure("8 bits", READ), (1.2,) * 3, True),
        ("3 bits over 4 bits, time", over("3 bits", "4 bits"), (1.1,) * 3, True),
        ("2 bits: times best torch", figure("2 bits", BEST), (10,) * 2),
        ("2 bits: times 4 bits", over("4 bits", "2 bits"), (1.3,) * 3),
        *((f"{n} over 4 bits, time", over(n, "4 bits"), (1.2,) * 3, True) for n in three),
        ("4 bits: two threads over one", rows.two_threads("4 bits"), (1.75,) * 3),
        ("pages over contiguous, time", over("4 bits, paged", "4 bits"), (1.1,) * 3, True),
        (f"4 bits: times best torch {NO_BF16}", figure("4 bits", CAPPED)),
    ]
    return [line(rows.places, *each) for each in lines]


def avx2_lines(rows: Rows, places: Sequence[Place]) -> list[Cells]:
    """Return the lines over attend-avx2.json."""
    lesser, uncapped = rows.figure("4 bits", CAPPED), rows.figure("4 bits", BEST)
    return [
        line(places, f"{AVX2}: times best torch at AVX2", lesser, (4,) * 2),
        line(places, f"{AVX2}: times best torch, uncapped", uncapped),
    ]


def crossover(rows: Rows) -> Cells:
    """Return the line of the shortest context at which torch is faster."""
    times, first = rows.figure("4 bits", BEST), min(rows.tokens)
    lost = [[n for n in rows.tokens if (times(place, n) or 1) < 1] for place in rows.places]
    cells = [
        strong(", ".join(map(short, at)), True) if at else f"none from {short(first)}"
        for at in lost
    ]
    kept = [not at for at in lost] if first <= 32 else []
    return ["contexts at which 4 bits lose to torch", "none from 32", *cells, verdict(kept)]


def linear(rows: list[dict], places: Sequence[Place]) -> list[Cells]:
    """Return the lines over linearity.json: off a straight line, and off a flat ns per token."""
    lines = []
    found = {(r["shape"], r["threads"]): r for r in rows if r["candidate"] == "4 bits"}
    here = [found.get(place) for place in places]
    for what, key in (("a straight line", "off_line"), ("flat ns per token", "off_median")):
        cells = ["-" if r is None else strong(f"{r[key]:.1%}", r[key] > BOUND) for r in here]
        kept = [r[key] <= BOUND for r in here if r is not None]
        if key == "off_median":
            cells = [
                cell if r is None else f"{cell} (flat from {short(r['flat_from'])})"
                for cell, r in zip(cells, here, strict=True)
            ]
        title = f"4 bits: furthest from {what}, all contexts"
        lines.append([title, f"<= {BOUND:.0%}", *cells, verdict(kept)])
    return lines


def report(folder: Path) -> str:
    """Return the table as Markdown."""
    rows = Rows(folder / "attend.json")
    cells = [*attend_lines(rows), crossover(rows)]
    if (folder / "attend-avx2.json").exists():
        cells += avx2_lines(Rows(folder / "attend-avx2.json"), rows.places)
    if (folder / "linearity.json").exists():
        found = json.loads((folder / "linearity.json").read_text("utf-8"))
        cells += linear(found["rows"], rows.places)
    columns = ["", "target", *(f"{s}, {n} thread(s)" for s, n in rows.places), "holds"]
    said = "Over 4k / 16k / 64k tokens, or 16k / 64k; what misses its target is bold."
    text = ["# Figures and targets", "", head(rows.about), "", said, ""]
    text.append(runner.table(columns, cells, len(columns)))
    if (folder / "generate.json").exists():
        held = json.loads((folder / "generate.json").read_text("utf-8"))["lines"]
        text += ["", "## A real model, end to end", "", *(f"- {each}" for each in held)]
    return "\n".join(text) + "\n"


def main() -> None:
    """Print the table and write it."""
    options = runner.arguments(__doc__, "folder", folder=runner.BENCH)
    text = report(options.folder)
    (options.folder / "lines.md").write_text(text, "utf-8")
    print(text)


if __name__ == "__main__":
    main()
