"""Consoles, tables, progress and the documents of ``--json``, the same in all commands."""

import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from pathlib import Path
from typing import Any

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.measure import Measurement
from rich.progress import (
    BarColumn,
    Progress,
    TaskProgressColumn,
    TextColumn,
    TimeRemainingColumn,
)
from rich.table import Column, Table
from rich.text import Text

from kvpact.files import json_ready
from kvpact.files import size_text as size_text

_TEXT = 12  # columns that text has at least
MINUTE = 60.0
PIPE_WIDTH = 160  # no terminal, no width: tables in files and pipes are not squeezed into 80


def output_console() -> Console:
    """Return a console on stdout, for results."""
    console = _console()
    return console if console.is_terminal else _console(width=max(console.width, PIPE_WIDTH))


def error_console() -> Console:
    """Return a console on stderr, for progress, notes and errors."""
    return _console(stderr=True)


def _console(**given: Any) -> Console:
    """Return a console; with NO_COLOR no style leaves an escape sequence."""
    return Console(**given, color_system=None if os.environ.get("NO_COLOR") else "auto")


def printable(text: object) -> str:
    """Return text from elsewhere as safe to print: what shows no character is escaped."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in str(text))


def literal(text: object) -> Text:
    """Return `printable` text for tables and `Console.print`, where it is no markup either."""
    return Text(printable(text))


def note(message: str) -> None:
    """Print a line on stderr."""
    error_console().print(
        printable(message), style="dim", markup=False, highlight=False, soft_wrap=True
    )


def print_table(
    columns: Iterable[str | Text],
    rows: Iterable[Iterable[str | Text]],
    *,
    title: str = "",
    left: int = 1,
    spare: Sequence[str] = (),
) -> None:
    """Print a table whose first `left` columns are text and the others numbers.

    Where there is no terminal, each row is a line, however long. In a terminal that is too narrow
    `spare` columns are left out, from the first on, and a line says so; where the numbers alone
    need more room, rows are wrapped.
    """
    style: dict[str, Any] = {"title_justify": "left", "box": SIMPLE_HEAD}
    grid = Table(title=title or None, pad_edge=False, collapse_padding=True, **style)
    for index, column in enumerate(columns):
        if index < left:
            # Numbers are never cut: on a narrow terminal the text gives way, but not wholly.
            grid.add_column(column, overflow="fold", min_width=0 if index else _TEXT)
        else:
            grid.add_column(column, justify="right", no_wrap=True)
    for row in rows:
        grid.add_row(*row)
    console, left_out = output_console(), []
    wide = console.options.update(max_width=sys.maxsize)
    for name in spare if console.is_terminal else ():
        if Measurement.get(console, wide, grid).maximum > console.width:
            grid.columns = [column for column in grid.columns if column.header != name]
            for index, kept in enumerate(grid.columns):
                kept._index = index  # by which rich pads
            left_out.append(name.replace("-\n", "").replace("/\n", "/").replace("\n", " "))
    if console.is_terminal:
        numbers = copy(grid)
        numbers.columns = [column for column in grid.columns if column.no_wrap]
        text = len(grid.columns) - len(numbers.columns)
        least = Measurement.get(console, wide, numbers).maximum + text * (_TEXT + 2)
    else:
        least = Measurement.get(console, wide, grid).maximum
    console.width = max(least, console.width)
    console.print(grid, markup=False)
    if left_out:
        explain(f"A wider terminal has more columns: {', '.join(left_out)}.")


def print_pairs(head: tuple[str, object], rows: Iterable[tuple[str, object]]) -> None:
    """Print a table of names and values."""
    print_table((head[0], literal(head[1])), ((name, literal(value)) for name, value in rows))


def explain(text: str) -> None:
    """Print a sentence on what stands above it."""
    output_console().print(text, style="dim", highlight=False)


def say(text: str) -> None:
    """Print text as it is, however long its lines."""
    output_console().print(Text(text), soft_wrap=True, highlight=False)


def show_files(files: list[Path]) -> None:
    """Print which files were written, if any."""
    if files:
        say("written: " + ", ".join(map(str, files)))


def print_document(command: str, **fields: object) -> None:
    """Print the result of a command, named by its words, as one JSON document.

    Bytes are whole numbers, times are in seconds, and what is no number (NaN, infinity) is null.
    ``tests/cli/test_json.py`` holds the keys of each document and checks them.
    """
    document = {"command": command, **fields}
    escaped = not output_console().encoding.lower().startswith("utf")
    typer.echo(json.dumps(json_ready(document), indent=2, allow_nan=False, ensure_ascii=escaped))


def _by_the_minute(title: str) -> Callable[[float, float | None, str], None]:
    """Return a report that is a line of a log, of work that takes over a minute."""
    begin = last = time.monotonic()

    def report(done: float, total: float | None, what: str) -> None:
        nonlocal last
        if (now := time.monotonic()) - last >= MINUTE:
            last = now
            share = f"{done / total:.0%}, " if total else ""
            note(f"{title}: {share}{what}, {(now - begin) / 60:.0f} min")

    return report


@contextmanager
def progress(title: str) -> Iterator[Callable[[float, float | None, str], None]]:
    """Yield ``report(done, total or None, what)``: a passing bar; elsewhere a line a minute."""
    console = error_console()
    if not console.is_terminal or console.no_color:
        yield _by_the_minute(title)
        return
    columns = (
        TextColumn(printable(title).replace("{", "{{").replace("}", "}}"), markup=False),
        BarColumn(bar_width=20),
        TaskProgressColumn(),
        TimeRemainingColumn(),
        TextColumn("left"),
        TextColumn(
            "{task.description}",
            style="dim",
            markup=False,
            table_column=Column(no_wrap=True, overflow="ellipsis"),
        ),
    )
    # The time left comes from the speed of the whole run: that of its last seconds makes it jump.
    with Progress(*columns, console=console, transient=True, speed_estimate_period=math.inf) as bar:
        task = bar.add_task("", total=None)
        yield lambda done, total, what: bar.update(
            task, completed=done, total=total, description=printable(what)
        )
