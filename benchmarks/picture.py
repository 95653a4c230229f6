"""The README's picture: quality over bits, beside the caches of other packages.

    python benchmarks/picture.py [--model smollm2] [--out docs/_static]

Drawn from benchmarks/results/leaderboard, which `leaderboard.py` writes, as overview-light.svg and
overview-dark.svg. Each file has the figures that it shows as its description.
"""

import json
from pathlib import Path
from typing import Any

import runner
from leaderboard_table import MODELS, Row, load, middle, rows_of
from matplotlib import rc_context

from kvpact.evaluate.canvas import new_figure, plain_axes

ROOT = Path(__file__).parents[1]
RESULTS, OUT = ROOT / "benchmarks" / "results" / "leaderboard", ROOT / "docs" / "_static"

INKS = {
    "light": dict(ink="#1b1f24", muted="#5c6570", grid="#e1e5ea", own="#0060a8", peer="#b3541e"),
    "dark": dict(ink="#e6e9ed", muted="#a0a9b4", grid="#2c333b", own="#6cb6f5", peer="#f0954f"),
}
# The caches that are named, with where the words stand from the point, in points of type.
LABELS = {
    "trellis:bits=2": ("kvpact trellis,\n2, 3 and 4 bits", (-6, -14), "right", "top"),
    "turboquant:bits=4": ("kvpact turboquant, 4 bits", (12, 0), "left", "center"),
    "int:bits=8": ("kvpact int, 8 bits", (-12, 0), "right", "center"),
    "QuantizedCache, quanto, 4 bits": ("quanto and HQQ, 4 bits", (2, -9), "left", "top"),
    "QuantizedCache, fp8": ("transformers' and\nvLLM's fp8", (22, 0), "left", "center"),
    "q8_0, as llama.cpp's": ("llama.cpp's q8_0", (12, 0), "left", "center"),
    "q4_0, as llama.cpp's": ("llama.cpp's q4_0", (10, 7), "left", "center"),
    "make_turboquant_cache, 4 bits": ("other packages, 4 bits", (12, -5), "left", "center"),
}
LINE = "trellis:"  # the points of this method are joined
MOST_BITS = 12.0


def figures(rows: list[Row]) -> dict[str, Any]:
    """Return the figures that the picture shows, rounded: its description."""
    at = middle(rows)
    drawn, beyond = ([r for r in rows if (r.bits[at] > MOST_BITS) is far] for far in (False, True))
    return {
        "model": rows[0].model,
        "bits at": at,
        "kl over bits": {r.cache: [round(r.bits[at], 2), float(f"{r.kl:.3g}")] for r in drawn},
        "not drawn": {r.package: [round(r.bits[at], 2), float(f"{r.kl:.3g}")] for r in beyond},
    }


def draw(rows: list[Row], shown: dict[str, Any], mode: str, path: Path) -> None:
    """Draw the panel, and write an SVG."""
    inks, points = INKS[mode], shown["kl over bits"]
    figure = new_figure((8.6, 4.4))
    axes = figure.subplots()
    plain_axes(axes)
    axes.set_facecolor("none")
    axes.grid(True, color=inks["grid"], linewidth=0.8)
    axes.tick_params(colors=inks["muted"], which="both", labelsize=12)
    for side in ("left", "bottom"):
        axes.spines[side].set_color(inks["muted"])
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:.6f}".rstrip("0").rstrip("."))
    bits, kls = zip(*points.values(), strict=True)
    axes.set_xlim(0, max(bits) + 2)
    axes.set_ylim(min(kls) / 3, max(kls) * 2.5)
    title = f"Difference from the exact cache (KL), {MODELS[shown['model']]}"
    axes.set_title(title, loc="left", fontsize=13.5, color=inks["ink"], pad=12)
    across = f"bits held for each number at {shown['bits at']:,} tokens, all counted; exact is 16"
    axes.set_xlabel(across, fontsize=12.5, color=inks["muted"])
    joined = sorted(point for name, point in points.items() if name.startswith(LINE))
    axes.plot(*zip(*joined, strict=True), "-", lw=2, color=inks["own"])
    own = {row.cache: row.own for row in rows}
    for name, (x, y) in points.items():
        colour, form = (inks["own"], "o") if own[name] else (inks["peer"], "D")
        axes.plot(x, y, form, ms=9 if own[name] else 7, color=colour, zorder=3)
        if name in LABELS:
            text, offset, across_at, down_at = LABELS[name]
            place = {"xytext": offset, "textcoords": "offset points", "fontsize": 13}
            axes.annotate(text, (x, y), color=colour, ha=across_at, va=down_at, **place)
    arrow = {"arrowstyle": "->", "color": inks["muted"], "lw": 1.6}
    place = {"xycoords": "axes fraction", "xytext": (0.1, 0.2), "color": inks["muted"]}
    axes.annotate("lower left is better", (0.02, 0.04), arrowprops=arrow, fontsize=13, **place)
    figure.tight_layout()
    about = {"Date": None, "Creator": "benchmarks/picture.py", "Description": json.dumps(shown)}
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "kvpact"}):
        figure.savefig(path, transparent=True, metadata=about)


def main() -> None:
    options = runner.arguments(__doc__, model="smollm2", results=RESULTS, out=OUT)
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
