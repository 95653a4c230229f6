"""Charts of several runs: every spec's KL on each model and text."""

from __future__ import annotations

from collections.abc import Sequence
from os import PathLike
from typing import Any

from kvpact.evaluate.base import EvalResult, row_name
from kvpact.evaluate.canvas import COLOURS, INK, MARKERS, log_ticks, new_figure, plain_axes
from kvpact.evaluate.plot import FLOOR
from kvpact.evaluate.report import run_name


def save_summary_plot(runs: Sequence[EvalResult], path: str | PathLike[str]) -> None:
    """Draw mean KL (log scale) of every spec on every model and text, with two standard errors.

    Parameters
    ----------
    runs : sequence of EvalResult
        Of the same candidates; the exact cache is left out.
    path : str or path
        A PNG.

    Raises
    ------
    BackendUnavailable
        matplotlib is not installed.
    """
    names = [row_name(row) for row in runs[0].rows if row.spec != "none"]
    figure = new_figure((10, 1.6 + 0.45 * len(names) + 0.25 * len(runs)))
    axes: Any = figure.add_subplot()
    axes.set_xscale("log")
    log_ticks(axes.xaxis)
    axes.set_xlabel("mean KL to the exact cache, nats per token; bars: two standard errors")
    axes.set_title("KL of each spec on every model and text", loc="left", fontsize=11, color=INK)
    for index, run in enumerate(runs):
        rows = {row_name(row): row for row in run.rows}
        drawn = [(i, rows[name]) for i, name in enumerate(names) if rows[name].kl_mean > FLOOR]
        kl = [row.kl_mean for _, row in drawn]
        # On a log scale a bar can't reach zero.
        below = [min(2 * row.kl_se, 0.9 * row.kl_mean) for _, row in drawn]
        above = [2 * row.kl_se for _, row in drawn]
        offset = (index - (len(runs) - 1) / 2) * 0.6 / len(runs)
        axes.errorbar(
            kl,
            [i + offset for i, _ in drawn],
            xerr=[below, above],
            fmt=MARKERS[index % len(MARKERS)],
            color=COLOURS[index % len(COLOURS)],
            label=run_name(run.protocol),
            ms=7,
        )
    plain_axes(axes)
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.legend(fontsize=9, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    figure.savefig(path, bbox_inches="tight")
