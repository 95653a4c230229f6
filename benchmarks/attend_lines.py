"""What the kernels are held to, and what was measured: one table.

    python benchmarks/attend_lines.py [DIR]

Reads DIR/attend.json, and attend-avx2.json, linearity.json and generate.json where they are there;
writes DIR/lines.md. Cells show 4k / 16k / 64k tokens; what misses its target is bold.
"""

import json
from collections.abc import Sequence
from pathlib import Path

import runner
from attend_linearity import BOUND
from machine import head

CONTEXTS = (4096, 16384, 65536)
BEST, READ, FP16 = "times_best_torch", "over_read", "times_fp16"
LINES: tuple[tuple[str, str, str, Sequence[float]], ...] = (
    ("4 bits: times best torch", "4 bits", BEST, (6.5, 8, 8)),
    ("4 bits: distance to the read", "4 bits", READ, (2.0, 2.0, 1.9)),
    ("4 bits: times own fused fp16", "4 bits", FP16, ()),
    ("8 bits: times best torch", "8 bits", BEST, (4.9,) * 3),
    ("8 bits: distance to the read", "8 bits", READ, (1.2,) * 3),
    ("3 bits over 4 bits, time", "3 bits", "4 bits", (1.1,) * 3),
    ("2 bits: times best torch", "2 bits", BEST, (10,) * 2),
    ("4 bits over 2 bits, time", "4 bits", "2 bits", (1.3,) * 3),
    *((f"{n} over 4 bits, time", n, "4 bits", (1.2,) * 3) for n in ("kivi 4", "kvarn 4")),
    ("centred 4 over 4 bits, time", "centred 4", "4 bits", (1.2,) * 3),
    ("4 bits: two threads over one", "4 bits", "threads", (1.75,) * 3),
    ("pages over contiguous, time", "4 bits, paged", "4 bits", (1.1,) * 3),
)
"""A title, a candidate, a figure of it or by whose time its own is divided, and targets at each
context or at the last ones; what has none is only reported."""
AT_LEAST = (BEST, FP16, "threads", "2 bits")
"""The figures that should be at least their targets; others should be at most."""
Place = tuple[str, int]  # shape, threads
Cells = list[str]


class Rows:
    """The rows of a file by place, context and candidate."""

    def __init__(self, path: Path) -> None:
        written = json.loads(path.read_text("utf-8"))
        self.about, rows = written["about"], written["rows"]
        self.found = {(r["shape"], r["threads"], r["tokens"], r["candidate"]): r for r in rows}
        self.places = list(dict.fromkeys((r["shape"], r["threads"]) for r in rows))
        self.tokens = sorted({r["tokens"] for r in rows})

    def figure(self, name: str, key: str, place: Place, tokens: int) -> float | None:
        """Return a figure of a candidate, None where it is not there."""
        row = self.found.get((*place, tokens, name), {})
        if key in (BEST, READ, FP16):
            return row.get(key)
        if key == "threads":  # one thread's time over that of two
            one = self.found.get((place[0], 1, tokens, name), {})
            return one["ms"] / row["ms"] if row and one and place[1] == 2 else None
        other = self.found.get((*place, tokens, key), {})
        return row["ms"] / other["ms"] if row and other else None

    def line(
        self, places: Sequence[Place], title: str, name: str, key: str, targets: Sequence[float]
    ) -> Cells:
        """Return a title, its target, a cell per place, and whether all targets hold."""
        cells, kept, least = [], [], key in AT_LEAST
        contexts = CONTEXTS[-len(targets) :] if targets else CONTEXTS
        for place in places:
            parts = []
            for index, tokens in enumerate(contexts):
                found = self.figure(name, key, place, tokens)
                if found is not None and targets:
                    kept.append((found >= targets[index]) if least else (found <= targets[index]))
                missed = found is not None and bool(targets) and not kept[-1]
                parts.append("-" if found is None else strong(f"{found:.2f}", missed))
            cells.append("-" if set(parts) == {"-"} else " / ".join(parts))
        shown = targets if len(set(targets)) > 1 else targets[:1]
        wanted = (">= " if least else "<= ") + " / ".join(f"{target:g}" for target in shown)
        return [title, wanted if targets else "reported", *cells, verdict(kept)]


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


def crossover(rows: Rows) -> Cells:
    """Return the line of the shortest context at which torch is faster."""
    first = min(rows.tokens)
    lost = [
        [n for n in rows.tokens if (rows.figure("4 bits", BEST, place, n) or 1) < 1]
        for place in rows.places
    ]
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
    for what, key in (("a straight line", "off_line"), ("flat ns per token", "off_median")):
        cells, kept = [], []
        for row in map(found.get, places):
            if row is None:
                cells.append("-")
                continue
            kept.append(row[key] <= BOUND)
            flat = f" (flat from {short(row['flat_from'])})" if key == "off_median" else ""
            cells.append(strong(f"{row[key]:.1%}", not kept[-1]) + flat)
        title = f"4 bits: furthest from {what}, all contexts"
        lines.append([title, f"<= {BOUND:.0%}", *cells, verdict(kept)])
    return lines


def report(folder: Path) -> str:
    """Return the table as Markdown."""
    rows = Rows(folder / "attend.json")
    cells = [*(rows.line(rows.places, *each) for each in LINES), crossover(rows)]
    if (folder / "attend-avx2.json").exists():
        line = ("AVX2 alone: times best torch at AVX2", "4 bits", BEST, (4,) * 2)
        cells.append(Rows(folder / "attend-avx2.json").line(rows.places, *line))
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
    options = runner.arguments(__doc__, "folder", folder=runner.BENCH)
    text = report(options.folder)
    (options.folder / "lines.md").write_text(text, "utf-8")
    print(text)


if __name__ == "__main__":
    main()
