"""Tasks as tables and a chart."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from os import PathLike
from typing import Any

from kvpact.evaluate.base import EvalResult, row_name
from kvpact.evaluate.canvas import COLOURS, INK, MARKERS, new_figure, plain_axes
from kvpact.evaluate.report import markdown, run_name
from kvpact.evaluate.task_scores import TaskResult, TaskRow


def task_columns(result: TaskResult) -> list[str]:
    """Return the columns: the spec, each task, all tasks, and answers that are right."""
    return ["spec", *_tasks(result), "all tasks", "right %"]


def task_lines(result: TaskResult) -> list[list[str]]:
    """Return the lines of the table: the exact cache's log-probabilities, then the differences."""
    rows = [row for row in result.rows() if row.depth is None]
    caches = list(dict.fromkeys(row_name(row) for row in rows))
    own = {name: [row for row in rows if row_name(row) == name] for name in caches}
    first = own[caches[0]]
    lines = [
        [
            "exact: log-probability",
            *(f"{row.exact_logprob:.3f}" for row in first),
            f"{first[-1].exact_correct:.0f}",
        ]
    ]
    for name, found in own.items():
        lines.append([name, *map(difference_text, found), f"{found[-1].correct:.0f}"])
    return lines


def difference_text(row: TaskRow) -> str:
    """Return a difference and its standard error."""
    return f"{row.difference:+.3f} ± {row.difference_se:.3f}"


def task_table(result: TaskResult) -> str:
    """Return the table of all depths as Markdown."""
    return markdown(task_columns(result), task_lines(result))


def depth_table(result: TaskResult) -> str:
    """Return the differences at each depth as a Markdown table."""
    rows = [row for row in result.rows() if row.depth is not None]
    depths = sorted({row.depth for row in rows if row.depth is not None})
    cells: dict[tuple[str, str], list[str]] = {}
    for row in sorted(rows, key=lambda row: row.depth or 0.0):
        cells.setdefault((row_name(row, "`"), row.task or ""), []).append(difference_text(row))
    columns = ["spec", "task", *(f"depth {depth:g}" for depth in depths)]
    return markdown(columns, [[*key, *line] for key, line in cells.items()], left=2)


def task_text(result: TaskResult) -> str:
    """Return how it was measured, in a few sentences."""
    row = result.rows()[-1]
    return (
        f"Tasks: {row.questions} questions after contexts of up to {result.context_tokens} tokens "
        f"made of the text with seed {result.seed}; log-probability of the whole answer, "
        "teacher-forced, in nats: that under this cache less that under the exact one, and its "
        "standard error, questions paired. right: every token of the answer is the likeliest."
    )


def task_data(run: EvalResult, result: TaskResult) -> dict[str, Any]:
    """Return everything measured, with how, ready for JSON."""
    rows = [asdict(row) for row in result.rows()]
    return {**asdict(run.protocol), **asdict(result), "rows": rows}


def save_task_plot(runs: Sequence[EvalResult], path: str | PathLike[str]) -> None:
    """Draw what each cache takes off the answers' log-probability, a panel for each run with tasks.

    Parameters
    ----------
    runs : sequence of EvalResult
        Those without tasks are left out.
    path : str or path
        A PNG; bars are two standard errors.

    Raises
    ------
    BackendUnavailable
        matplotlib is not installed.
    """
    panels = [(run, run.tasks) for run in runs if run.tasks is not None]
    lines = sum(len({row_name(s) for s in result.scores}) for _, result in panels)
    figure = new_figure((10, 1.0 + 1.4 * len(panels) + 0.5 * lines))
    for index, (run, result) in enumerate(panels):
        axes: Any = figure.add_subplot(len(panels), 1, index + 1)
        axes.set_title(f"{run_name(run.protocol)}: tasks", loc="left", fontsize=11, color=INK)
        _points(axes, result)
        plain_axes(axes)
    if panels:
        axes.set_xlabel(
            "log-probability of the answer less the exact cache's, nats; bars: two standard errors",
            color=INK,
        )
    figure.tight_layout()
    figure.savefig(path)


def _points(axes: Any, result: TaskResult) -> None:
    rows = [row for row in result.rows() if row.depth is None and row.task is not None]
    names = list(dict.fromkeys(row_name(row) for row in rows))
    tasks = _tasks(result)
    axes.axvline(0, color=INK, lw=0.8)
    for index, task in enumerate(tasks):
        own = [row for row in rows if row.task == task]
        offset = (index - (len(tasks) - 1) / 2) * 0.6 / len(tasks)
        axes.errorbar(
            [row.difference for row in own],
            [names.index(row_name(row)) + offset for row in own],
            xerr=[2 * row.difference_se for row in own],
            fmt=MARKERS[index % len(MARKERS)],
            color=COLOURS[index % len(COLOURS)],
            label=task,
            ms=6,
        )
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.legend(fontsize=9, loc="upper left", bbox_to_anchor=(1.0, 1.0))


def _tasks(result: TaskResult) -> list[str]:
    return list(dict.fromkeys(score.task for score in result.scores))
