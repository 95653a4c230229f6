"""What the kernels are held to, and what was measured: one table.

    python benchmarks/attend_lines.py [DIR]

Reads DIR/attend.json, and attend-avx2.json, linearity.json and generate.json where they are there;
writes DIR/lines.md. Cells show 4k / 16k / 64k tokens; what misses its target is bold.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from attend_figures import CONTEXTS, Line, Place, Rows, short, strong, verdict
from attend_linearity import BOUND
from attend_torch import AVX2, NO_BF16
from machine import head

BEST, CAPPED, READ, FP16 = "times_best_torch", "times_best_torch_capped", "over_read", "times_fp16"
LATE = CONTEXTS[1:]


def attend_lines(rows: Rows) -> list[Line]:
    """Return the lines over attend.json."""
    figure, over = rows.figure, rows.over
    three = "kivi 4", "kvarn 4", "centred 4"
    return [
        Line("4 bits: times best torch", figure("4 bits", BEST), (6.5, 8, 8)),
        Line("4 bits: distance to the read", figure("4 bits", READ), (2.0, 2.0, 1.9), True),
        Line("4 bits: times own fused fp16", figure("4 bits", FP16)),
        Line("8 bits: times best torch", figure("8 bits", BEST), (4.9,) * 3),
        Line("8 bits: distance to the read", figure("8 bits", READ), (1.2,) * 3, True),
        Line("3 bits over 4 bits, time", over("3 bits", "4 bits"), (1.1,) * 3, True),
        Line("2 bits: times best torch", figure("2 bits", BEST), (10,) * 2, False, LATE),
        Line("2 bits: times 4 bits", over("4 bits", "2 bits"), (1.3,) * 3),
        *(Line(f"{n} over 4 bits, time", over(n, "4 bits"), (1.2,) * 3, True) for n in three),
        Line("4 bits: two threads over one", rows.two_threads("4 bits"), (1.75,) * 3),
        Line("pages over contiguous, time", over("4 bits, paged", "4 bits"), (1.1,) * 3, True),
        Line(f"4 bits: times best torch {NO_BF16}", figure("4 bits", CAPPED)),
    ]


def avx2_lines(rows: Rows) -> list[Line]:
    """Return the lines over attend-avx2.json."""
    lesser = rows.figure("4 bits", CAPPED)
    return [
        Line(f"{AVX2}: times best torch at AVX2", lesser, (4,) * 2, False, LATE),
        Line(f"{AVX2}: times best torch, uncapped", rows.figure("4 bits", BEST), (), False, LATE),
    ]


def crossover(rows: Rows, places: Sequence[Place]) -> list[str]:
    """Return the line of the shortest context at which torch is faster."""
    lost = [rows.loses("4 bits", place) for place in places]
    first = min(rows.tokens)
    cells = [
        strong(", ".join(map(short, at)), True) if at else f"none from {short(first)}"
        for at in lost
    ]
    kept = [not at for at in lost] if first <= 32 else []
    return ["contexts at which 4 bits lose to torch", "none from 32", *cells, verdict(kept)]


def linear(rows: list[dict], places: Sequence[Place]) -> list[list[str]]:
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
    places = rows.places
    table = [line.cells(places) for line in attend_lines(rows)]
    table.append(crossover(rows, places))
    if (folder / "attend-avx2.json").exists():
        lines = avx2_lines(Rows(folder / "attend-avx2.json"))
        table += [line.cells(places) for line in lines]
    if (folder / "linearity.json").exists():
        table += linear(json.loads((folder / "linearity.json").read_text())["rows"], places)
    names = ["", "target", *(f"{shape}, {threads} thread(s)" for shape, threads in places), "holds"]
    text = ["# Figures and targets\n", head(rows.about)]
    text += ["\nOver 4k / 16k / 64k tokens, or 16k / 64k; what misses its target is bold.\n"]
    text += ["| " + " | ".join(cells) + " |" for cells in (names, ["---"] * len(names), *table)]
    if (folder / "generate.json").exists():
        held = json.loads((folder / "generate.json").read_text())["lines"]
        text += ["\n## A real model, end to end\n", *(f"- {line}" for line in held)]
    return "\n".join(text) + "\n"


def main() -> None:
    """Print the table and write it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, nargs="?", default=Path("build/bench"))
    folder = parser.parse_args().folder
    text = report(folder)
    (folder / "lines.md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
