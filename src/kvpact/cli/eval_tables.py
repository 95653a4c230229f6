"""What ``kvpact eval`` prints."""

from __future__ import annotations

from pathlib import Path

from kvpact.cli.console import output_console, print_table, table
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


def show_files(files: list[Path]) -> None:
    """Print which files were written, if any."""
    if files:
        output_console().print(
            "written: " + ", ".join(map(str, files)), soft_wrap=True, highlight=False
        )


def show(result: EvalResult, against: str | None = None, *, heading: bool = False) -> None:
    """Print the tables of an evaluation, and how it was measured."""
    columns = "spec|bits/\nvalue|MB|of all\n%|perplex-\nity|change\n%|KL\nmean|±|KL\np99|top-1\n%"
    grid = table(f"{columns}|time\ns".split("|"), title=run_name(result.protocol) * heading)
    for row in result.rows:
        grid.add_row(
            row_name(row),
            f"{row.bits_per_value:.2f}",
            f"{row.bytes / 1e6:.2f}",
            whole_share(row),
            f"{row.perplexity:.3f}",
            f"{row.perplexity_change:+.2f}",
            kl_text(row.kl_mean),
            kl_text(row.kl_se),
            kl_text(row.kl_p99),
            f"{row.top1:.1f}",
            f"{row.seconds:.1f}",
        )
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
