"""The README's picture: quality over bits, and decode time over context, with peers named.

    python benchmarks/picture.py [--model smollm2] [--out docs/_static]

Drawn from benchmarks/results/leaderboard, which `leaderboard.py` writes, as overview-light.svg and
overview-dark.svg. Each file has the figures that it shows as its description.
"""

from __future__ import annotations

import argparse
import json
import textwrap
from pathlib import Path
from typing import Any

from leaderboard_table import MODELS, Row, contexts_of, load, middle, rows_of

from kvpact.evaluate.canvas import new_figure, place_labels, plain_axes

HERE = Path(__file__).parent
RESULTS = HERE / "results" / "leaderboard"
OUT = HERE.parent / "docs" / "_static"

INKS = {
    "light": {"ink": "#1b1f24", "muted": "#5c6570", "grid": "#e1e5ea", "peer": "#b3541e"},
    "dark": {"ink": "#e6e9ed", "muted": "#a0a9b4", "grid": "#2c333b", "peer": "#f0954f"},
}
OWN = {"light": ("#0060a8", "#00795c", "#7a4fb5"), "dark": ("#6cb6f5", "#4fd1a5", "#c3a3f2")}
# kvpact's methods: the points of one are joined.
FAMILIES = ("trellis", "turboquant", "int")
# Caches of other packages as they are named in the picture.
NAMES = {
    "QuantizedCache, quanto, 4 bits": "quanto 4",
    "QuantizedCache, hqq, 4 bits": "hqq 4",
    "QuantizedCache, fp8": "transformers fp8",
    "TinyKVCache, safe (4 bits)": "tiny-turboquant 4",
    "make_turboquant_cache, 4 bits": "quantcore-ai 4",
}
# The lines of the panel on the right.
IN_TIME = ("trellis:bits=4", "turboquant:bits=4", "quanto 4", "hqq 4", "turbokv 4")
MOST_BITS = 12.0


def label(row: Row) -> str:
    """Return a cache's name in the picture."""
    if row.package == "turbokv":
        return "turbokv 4"
    return NAMES.get(row.cache, row.cache)


def figures(rows: list[Row]) -> dict[str, Any]:
    """Return the figures that the picture shows, rounded: its description."""
    at = middle(rows)
    drawn, beyond = ([r for r in rows if (r.bits[at] > MOST_BITS) is far] for far in (False, True))
    timed = [row for row in rows if label(row) in IN_TIME]
    return {
        "model": rows[0].model,
        "bits at": at,
        "kl over bits": {label(r): [round(r.bits[at], 2), float(f"{r.kl:.3g}")] for r in drawn},
        "not drawn": {r.package: [round(r.bits[at], 2), float(f"{r.kl:.3g}")] for r in beyond},
        "decode time over DynamicCache": {
            label(r): {str(n): round(r.steps[n][1], 2) for n in contexts_of(rows)} for r in timed
        },
    }


def draw(rows: list[Row], shown: dict[str, Any], mode: str, path: Path) -> None:
    """Draw both panels beside each other, and write an SVG."""
    import matplotlib

    matplotlib.rcParams["svg.hashsalt"] = "kvpact"  # the same figures are the same file
    inks = INKS[mode]
    figure = new_figure((11.0, 5.2))
    left, right = figure.subplots(1, 2, width_ratios=(1.35, 1))
    for axes in (left, right):
        plain_axes(axes)
        axes.set_facecolor("none")
        axes.grid(True, color=inks["grid"], linewidth=0.8)
        axes.tick_params(colors=inks["muted"], which="both", labelsize=11)
        for side in ("left", "bottom"):
            axes.spines[side].set_color(inks["muted"])
    named = quality(left, rows, shown, mode)
    times = decoding(right, rows, shown, mode)
    figure.tight_layout(w_pad=2.5, h_pad=2)
    figure.canvas.draw()
    for axes, points, sides in ((left, named, (1, -1)), (right, times, (1,))):
        texts, colours = [point[:3] for point in points], [point[3] for point in points]
        how = {"sides": sides, "inside_axes": True, "lines": inks["muted"]}
        place_labels(figure, axes, texts, size=10.5, inks=colours, **how)
    about = {"Date": None, "Creator": "benchmarks/picture.py", "Description": json.dumps(shown)}
    figure.savefig(path, transparent=True, metadata=about)


def titled(axes: Any, title: str, across: str, mode: str) -> None:
    """Put a title above a panel and a name below its axis."""
    axes.set_title(title, loc="left", fontsize=12.5, color=INKS[mode]["ink"], pad=12)
    axes.set_xlabel(across, fontsize=11.5, color=INKS[mode]["muted"])


def quality(axes: Any, rows: list[Row], shown: dict[str, Any], mode: str) -> list[Any]:
    """Draw KL over bits; return the points to name."""
    points = shown["kl over bits"]
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    bits, kls = zip(*points.values(), strict=True)
    axes.set_xlim(min(bits) - 0.6, max(bits) + 1.6)
    axes.set_ylim(min(kls) / 2, max(kls) * 2)
    title = f"KL to the exact cache (less is better), {MODELS[shown['model']]}"
    far = ", ".join(f"{name} {bits:.0f}" for name, (bits, _) in shown["not drawn"].items())
    across = f"bits held a value, all counted, at {shown['bits at']:,} tokens"
    if far:
        across += "\n" + textwrap.fill(f"further right: {far}", 60)
    titled(axes, title, across, mode)
    own = {label(row): row.own for row in rows}
    named = []
    for name, (x, y) in points.items():
        colour = colour_of(name, own[name], mode)
        axes.plot(
            x, y, "o" if own[name] else "D", ms=8 if own[name] else 6.5, color=colour, zorder=3
        )
        named.append((x, y, name, colour))
    for family in FAMILIES:
        line = sorted(point for name, point in points.items() if name.startswith(family + ":"))
        axes.plot(*zip(*line, strict=True), "-", lw=1.6, color=colour_of(family, True, mode))
    return named


def decoding(axes: Any, rows: list[Row], shown: dict[str, Any], mode: str) -> list[Any]:
    """Draw the time of a decode step over the context; return the ends of lines to name."""
    own = {label(row): row.own for row in rows}
    axes.set_xscale("log")
    title = "time of a decode step over DynamicCache's"
    titled(axes, title, "tokens of context", mode)
    axes.axhline(1, color=INKS[mode]["ink"], lw=1.2, ls=(0, (4, 3)))
    ends, contexts, most = [], [], 1.0
    for name, times in shown["decode time over DynamicCache"].items():
        contexts, values = [int(count) for count in times], list(times.values())
        colour = colour_of(name, own[name], mode)
        axes.plot(contexts, values, "o-" if own[name] else "D-", ms=6, lw=1.8, color=colour)
        ends.append((contexts[-1], values[-1], name, colour))
        most = max(most, *values)
    axes.set_xticks(contexts, [f"{count:,}" for count in contexts])
    axes.set_xticks([], minor=True)
    axes.set_xlim(contexts[0] * 0.85, contexts[-1] * (contexts[-1] / contexts[0]) ** 0.65)
    axes.set_ylim(0, most * 1.08)
    # Behind the last context, where no line is.
    place = {"xytext": (8, -13), "textcoords": "offset points", "fontsize": 10.5}
    axes.annotate("exact cache", (contexts[-1], 1), color=INKS[mode]["ink"], **place)
    return ends


def colour_of(name: str, own: bool, mode: str) -> str:
    """Return the colour of a cache: one for each of kvpact's families, one for all peers."""
    if not own:
        return INKS[mode]["peer"]
    family = name.partition(":")[0]
    return OWN[mode][FAMILIES.index(family)] if family in FAMILIES else INKS[mode]["muted"]


def main() -> None:
    """Draw both."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--out", type=Path, default=OUT)
    options = parser.parse_args()
    rows = [row for row in rows_of(load(options.results)) if row.model == options.model]
    if not rows:
        raise SystemExit(f"{options.results} has no figures of {options.model}")
    shown = figures(rows)
    options.out.mkdir(parents=True, exist_ok=True)
    for mode in INKS:
        path = options.out / f"overview-{mode}.svg"
        draw(rows, shown, mode, path)
        print(f"written to {path}")


if __name__ == "__main__":
    main()
