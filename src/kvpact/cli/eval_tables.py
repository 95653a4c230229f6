"""What ``kvpact eval`` prints."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from kvpact.cli.console import narrow, output_console, print_table, table
from kvpact.evaluate import (
    EvalResult,
    EvalRow,
    FreeRunningResult,
    SummaryRow,
    TaskResult,
    differences,
)
from kvpact.evaluate.base import row_name
from kvpact.evaluate.files import PAIRED
from kvpact.evaluate.free_running_report import (
    COLUMNS,
    free_running_cells,
    free_running_text,
)
from kvpact.evaluate.report import (
    kl_text,
    protocol_text,
    run_name,
    signed,
    summary_cells,
    summary_columns,
    whole_share,
)
from kvpact.evaluate.task_report import task_columns, task_lines, task_text

_MORE = ("MB", "KL\np99", "time\ns")  # for which a narrow terminal has no room


def show_files(files: list[Path]) -> None:
    """Print which files were written, if any."""
    if files:
        output_console().print(
            "written: " + ", ".join(map(str, files)), soft_wrap=True, highlight=False
        )


def show(result: EvalResult, against: str | None = None, *, heading: bool = False) -> None:
    """Print the tables of an evaluation, and how it was measured."""
    columns: dict[str, Callable[[EvalRow], str]] = {
        "bits/\nvalue": lambda row: f"{row.bits_per_value:.2f}",
        "MB": lambda row: f"{row.bytes / 1e6:.2f}",
        "of all\n%": whole_share,
        "perplex-\nity": lambda row: f"{row.perplexity:.3f}",
        "change\n%": lambda row: f"{row.perplexity_change:+.2f}",
        "KL\nmean": lambda row: kl_text(row.kl_mean),
        "±": lambda row: kl_text(row.kl_se),
        "KL\np99": lambda row: kl_text(row.kl_p99),
        "top-1\n%": lambda row: f"{row.top1:.1f}",
        "time\ns": lambda row: f"{row.seconds:.1f}",
    }
    shown = {name: text for name, text in columns.items() if not (narrow(100) and name in _MORE)}
    grid = table(("spec", *shown), title=run_name(result.protocol) * heading)
    for row in result.rows:
        grid.add_row(row_name(row), *(text(row) for text in shown.values()))
    console = output_console()
    print_table(grid)
    found = differences(result, against)
    if found:
        paired = table(
            ("spec", "KL less", "±", "ratio"), title=f"paired, against {found[0].against}"
        )
        for x in found:
            ratio = f"{x.kl_ratio:.3f}"
            paired.add_row(x.spec, signed(x.kl_difference), kl_text(x.kl_difference_se), ratio)
        print_table(paired)
    console.print(protocol_text(result.protocol, result.rows), style="dim", highlight=False)
    if result.free_running is not None:
        show_free_running(result.free_running)
    if result.tasks is not None:
        show_tasks(result.tasks)


def show_tasks(result: TaskResult) -> None:
    """Print what each cache takes off the answers' log-probability."""
    grid = table(task_columns(result))
    for line in task_lines(result):
        grid.add_row(*line)
    console = output_console()
    print_table(grid)
    console.print(task_text(result), style="dim", highlight=False)


def show_free_running(result: FreeRunningResult) -> None:
    """Print how each cache did along the exact cache's greedy text."""
    grid = table(COLUMNS)
    for row in result.rows:
        grid.add_row(row_name(row), *free_running_cells(row, result.steps))
    console = output_console()
    print_table(grid)
    console.print(free_running_text(result), style="dim", highlight=False)


def show_summary(rows: list[SummaryRow]) -> None:
    """Print a summary over models and texts."""
    if not rows:
        return
    columns = [column.replace("`", "") for column in summary_columns(rows)]
    grid = table(columns, title=f"all {rows[0].runs} runs")
    for row in rows:
        grid.add_row(row.spec, *summary_cells(row))
    console = output_console()
    print_table(grid)
    console.print(PAIRED, style="dim", highlight=False)


def show_ratios(result: EvalResult) -> None:
    """Print how much more KL a spec costs without sinks and window, and packed only."""
    grid = table(("spec", "KL mean", "sinks=0,window=0", "packed only"), title="KL over the spec's")
    rows = [row for row in result.rows if row.spec != "none"]
    for start in range(0, len(rows) - 2, 3):
        full, bare, packed = rows[start : start + 3]
        grid.add_row(full.spec, kl_text(full.kl_mean), _ratio(bare, full), _ratio(packed, full))
    print_table(grid)


def _ratio(row: EvalRow, base: EvalRow) -> str:
    return f"x {row.kl_mean / base.kl_mean:.2f}" if base.kl_mean > 0 else "-"
