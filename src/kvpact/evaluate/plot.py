"""The charts of a report: KL over bytes, KL of all runs, and a panel for each probe."""

import math
from collections.abc import Sequence
from os import PathLike
from typing import Any

from kvpact.evaluate import canvas
from kvpact.evaluate.base import EvalRow, row_name, run_name
from kvpact.evaluate.free_running import FreeRunningResult
from kvpact.evaluate.growth import GrowthPanel
from kvpact.evaluate.task_scores import TaskResult
from kvpact.evaluate.text import ROUNDING, VERDICTS

Probe = FreeRunningResult | TaskResult
"""A measurement besides the scores of the text: it has its tables, its sentence, its chart."""


def save_plot(rows: Sequence[EvalRow], path: str | PathLike[str], *, title: str = "") -> None:
    """Draw mean KL (log scale) over the share of an exact 16-bit cache's bytes, and verdicts.

    Parameters
    ----------
    rows : sequence of EvalRow
        Rows whose KL is below 1e-9 (the exact cache) or not finite are named under the plot.
    path : str or path
        A PNG of 1500 x 960 pixels.
    title : str
        A line above the plot.
    """
    figure = canvas.new_figure((10, 6.4))
    axes: Any = figure.add_subplot()
    drawn = [row for row in rows if ROUNDING < row.kl_mean < math.inf and row.share > 0]
    axes.set_yscale("log")
    canvas.log_ticks(axes.yaxis)
    axes.set_xlabel(
        "bytes, % of an exact 16-bit cache (sinks and window included)", color=canvas.INK
    )
    axes.set_ylabel("mean KL to the exact cache, nats per token", color=canvas.INK)
    axes.set_title(title, loc="left", fontsize=11, color=canvas.INK, wrap=True)
    canvas.plain_axes(axes)
    if drawn:
        _scale(axes, drawn)
        _points(axes, drawn)
    missing = [
        f"{row_name(row)} (KL {0 if row.kl_mean <= ROUNDING else row.kl_mean}, "
        f"{100 * row.share:.3g} %)"
        for row in rows
        if row not in drawn
    ]
    if missing:
        names = "not drawn: " + ", ".join(missing)
        figure.text(0.99, 0.012, names, ha="right", color=canvas.MUTED, fontsize=9)
    figure.tight_layout(rect=(0, 0.03, 1, 1))
    figure.canvas.draw()
    if drawn:
        named = [(100 * row.share, row.kl_mean, row_name(row)) for row in drawn]
        canvas.place_labels(figure, axes, named)
    figure.savefig(path)


def _scale(axes: Any, rows: Sequence[EvalRow]) -> None:
    """Begin with no bytes, leave room for labels, and draw the limits of verdicts that are near."""
    kl = [row.kl_mean for row in rows]
    axes.set_xlim(0, 1.25 * max(100 * row.share for row in rows))
    low, high = min(kl) / 2, max(kl) * 2
    above = [most for _, most in VERDICTS if most >= max(kl)]
    axes.set_ylim(low, max(high, 1.3 * above[0]) if above else high)
    low, high = axes.get_ylim()
    for name, most in VERDICTS:
        if low < most < high:
            axes.axhline(most, color=canvas.MUTED, linewidth=1, linestyle="--", zorder=1)
            below = {"xytext": (-3, -3), "textcoords": "offset points", "ha": "right", "va": "top"}
            place = {"xycoords": axes.get_yaxis_transform(), **below}
            axes.annotate(name, (1, most), color=canvas.MUTED, fontsize=9, **place)


def _family(row: EvalRow) -> str:
    return "/".join(side.partition(":")[0] for side in row.spec.split("/"))


def _points(axes: Any, rows: Sequence[EvalRow]) -> None:
    """Draw the rows in one colour a method, so that its options are seen as one family."""
    names = list(dict.fromkeys(map(_family, rows)))
    for row in rows:
        colour = canvas.COLOURS[names.index(_family(row)) % len(canvas.COLOURS)]
        face = "white" if row.packed_only else colour
        style = {"ms": 8, "mew": 1.8, "mec": colour, "mfc": face, "zorder": 3}
        axes.plot(100 * row.share, row.kl_mean, "o", **style)


def save_summary_plot(runs: Sequence[Any], path: str | PathLike[str]) -> None:
    """Draw mean KL (log scale) of every spec on every model and text, with two standard errors."""
    names = [row_name(row) for row in runs[0].rows if row.spec != "none"]
    figure = canvas.new_figure((10, 1.6 + 0.45 * len(names) + 0.25 * len(runs)))
    axes: Any = figure.add_subplot()
    axes.set_xscale("log")
    canvas.log_ticks(axes.xaxis)
    axes.set_xlabel("mean KL to the exact cache, nats per token; bars: two standard errors")
    axes.set_title(
        "KL of each spec on every model and text", loc="left", fontsize=11, color=canvas.INK
    )
    series = []
    for run in runs:
        rows = {row_name(row): row for row in run.rows}
        drawn = [(i, rows[name]) for i, name in enumerate(names) if rows[name].kl_mean > ROUNDING]
        # On a log scale a bar can't reach zero.
        points = [
            (i, row.kl_mean, min(2 * row.kl_se, 0.9 * row.kl_mean), 2 * row.kl_se)
            for i, row in drawn
        ]
        series.append((run_name(run.protocol), points))
    canvas.plain_axes(axes)
    canvas.error_bars(axes, names, series, 7)
    figure.savefig(path, bbox_inches="tight")


def save_panels(
    panels: Sequence[tuple[str, Probe | GrowthPanel]], path: str | PathLike[str]
) -> None:
    """Draw a probe's results of each run, by the runs' names, one panel above the other."""
    first = panels[0][1]
    figure = canvas.new_figure((10, first.margin + sum(probe.height for _, probe in panels)))
    for index, (run, probe) in enumerate(panels):
        axes: Any = figure.add_subplot(len(panels), 1, index + 1)
        probe.draw(axes, run)
        canvas.plain_axes(axes)
    axes.set_xlabel(first.x_label, color=canvas.INK)
    figure.tight_layout()
    figure.savefig(path)
