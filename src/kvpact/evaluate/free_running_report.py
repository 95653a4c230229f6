"""Free running as a table and a chart."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from os import PathLike
from typing import Any

from kvpact.evaluate.base import EvalResult, row_name
from kvpact.evaluate.canvas import COLOURS, INK, MUTED, log_ticks, new_figure, plain_axes
from kvpact.evaluate.free_running import FreeRunningResult, FreeRunningRow
from kvpact.evaluate.report import kl_text, markdown, run_name

COLUMNS = ("spec", "KL mean", "±", "first quarter", "last quarter", "top-1 %", "first divergence")
SMOOTH = 16  # steps of the running mean that is drawn


def free_running_cells(row: FreeRunningRow, steps: int) -> list[str]:
    """Return the figures of a row; `steps` is how many there were."""
    first = row.first_divergence
    return [
        kl_text(row.kl_mean),
        kl_text(row.kl_se),
        kl_text(row.kl_first),
        kl_text(row.kl_last),
        f"{row.top1:.1f}",
        f"none in {steps}" if first is None else f"step {first}",
    ]


def free_running_table(result: FreeRunningResult) -> str:
    """Return the rows as a Markdown table."""
    rows = [[row_name(row, "`"), *free_running_cells(row, result.steps)] for row in result.rows]
    return markdown(COLUMNS, rows)


def free_running_text(result: FreeRunningResult) -> str:
    """Return how it was measured, in a few sentences."""
    return (
        f"Free running: the exact cache continues {result.prompt_tokens} tokens greedily for "
        f"{result.steps} steps, and every cache is fed that text one token at a time; KL in nats "
        "per step, first divergence is the first step at which a cache would have chosen another "
        f"token. {result.distinct:.0f} % of the text's sequences of 8 tokens are distinct."
    )


def free_running_data(run: EvalResult, result: FreeRunningResult) -> dict[str, Any]:
    """Return everything measured, with how, ready for JSON."""
    return {**asdict(run.protocol), **asdict(result)}


def save_free_running_plot(runs: Sequence[EvalResult], path: str | PathLike[str]) -> None:
    """Draw KL against the step, a panel for each run that ran free.

    Parameters
    ----------
    runs : sequence of EvalResult
        Those without a free run are left out.
    path : str or path
        A PNG. Lines are running means over 16 steps on a log scale; a dot marks the step at which
        a cache would first have chosen another token.

    Raises
    ------
    BackendUnavailable
        matplotlib is not installed.
    """
    panels = [(run, run.free_running) for run in runs if run.free_running is not None]
    figure = new_figure((10, 0.6 + 4.2 * max(len(panels), 1)))
    for index, (run, result) in enumerate(panels):
        axes: Any = figure.add_subplot(len(panels), 1, index + 1)
        axes.set_yscale("log")
        log_ticks(axes.yaxis)
        axes.set_ylabel(f"KL, nats (mean over {SMOOTH} steps)", color=INK)
        title = f"{run_name(run.protocol)}: free running after {result.prompt_tokens} tokens"
        axes.set_title(title, loc="left", fontsize=11, color=INK)
        _lines(axes, [row for row in result.rows if row.spec != "none"])
        plain_axes(axes)
    if panels:
        axes.set_xlabel("step; a dot: the first at which the cache's own choice differs", color=INK)
    figure.tight_layout()
    figure.savefig(path)


def _lines(axes: Any, rows: Sequence[FreeRunningRow]) -> None:
    for index, row in enumerate(rows):
        colour = COLOURS[index % len(COLOURS)]
        line = running_mean(row.kl)
        style = "--" if row.packed_only else "-"
        steps = range(1, len(line) + 1)
        axes.plot(steps, line, style, color=colour, lw=1.6, label=row_name(row))
        if row.first_divergence is not None:
            at = row.first_divergence
            axes.plot(at, line[at - 1], "o", ms=7, mfc="white", mec=colour, mew=1.8, zorder=3)
    if rows:
        axes.legend(fontsize=9, loc="upper left", bbox_to_anchor=(1.0, 1.0), labelcolor=MUTED)


def running_mean(values: Sequence[float]) -> list[float]:
    """Return at each place the mean of the last `SMOOTH` values up to it."""
    return [
        sum(values[max(i - SMOOTH + 1, 0) : i + 1]) / min(i + 1, SMOOTH) for i in range(len(values))
    ]
