"""``kvpact llama-cpp``: attention of llama.cpp's programs by a backend that is loaded into them."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from kvpact.cli import options
from kvpact.cli.console import (
    explain,
    literal,
    note,
    print_document,
    print_pairs,
    print_table,
    progress,
)
from kvpact.cli.inputs import InputError

if TYPE_CHECKING:
    from kvpact.integrations.llama_cpp.programs import Ops

QUICK = "hsk=(64|128|256),.*kv=1024,.*type_K=(q8_0|q4_0|q4_1|q5_0|q5_1|iq4_nl)"
ROUNDS = 2
NEW = 16


def line(context: typer.Context, as_json: bool = options.JSON) -> None:
    """Print the line that loads kvpact into llama.cpp's programs."""
    if context.invoked_subcommand:
        return
    from kvpact.integrations.llama_cpp import environment

    variables = environment()
    if as_json:
        print_document("llama-cpp", environment=variables)
        return
    words = (f"{name}={shlex.quote(value)}" for name, value in variables.items())
    typer.echo(f"export {' '.join(words)}")
    note(
        "llama.cpp's programs that are started with these variables attend with kvpact where flash "
        "attention is on and the cache is quantised: add -fa on -ctk q8_0 -ctv q8_0. "
        "`kvpact llama-cpp check BUILD` tells whether yours do."
    )


def check(
    build: Path = typer.Argument(
        ...,
        metavar="BUILD",
        exists=True,
        help="Folder of a build of llama.cpp, or one of its programs.",
    ),
    model: Path | None = options.optional(
        "GGUF file: times its tokens with and without kvpact.", exists=True, dir_okay=False
    ),
    threads: int = typer.Option(1, min=1, help="CPU threads."),
    depth: int = typer.Option(2048, min=0, help="Tokens in the cache before those timed."),
    cache: list[str] = typer.Option(
        ["q8_0"], help="Type of K and V in the cache; several may be given."
    ),
    every: bool = typer.Option(False, "--all", help="Compare all operations, not those most used."),
    limit: float = typer.Option(1800.0, min=1, help="Seconds that one run of a program may take."),
    as_json: bool = options.JSON,
) -> None:
    """Load kvpact into a build of llama.cpp: what loads it, whether it is right, what it saves."""
    from kvpact.integrations.llama_cpp import library, programs

    found = programs.programs(build)
    if model is not None and "llama-bench" not in found:
        raise InputError(f"--model needs llama-bench, which is not in {build}")
    programs.check_loads(found)
    ways, ops = programs.readers(found), None
    if tests := found.get("test-backend-ops"):
        with progress("comparing operations") as report:
            ops = programs.operations(tests, "" if every else QUICK, report, limit)
    times: list[dict[str, Any]] = []
    if model is not None:
        with progress("timing tokens") as report:
            for number, kind in enumerate(cache):
                report(number, len(cache), kind)
                words = ["-m", model, "-fa", 1, "-ctk", kind, "-ctv", kind, "-t", threads,
                         "-p", 0, "-n", NEW, "-d", depth]  # fmt: skip
                pair = programs.pair(found["llama-bench"], words, ROUNDS, limit)
                times.append({"cache": kind, **pair})
    if as_json:
        print_document(
            "llama-cpp check", library=str(library()), programs=ways,
            operations=None if ops is None else ops._asdict(), depth=depth, threads=threads,
            times=times,
        )  # fmt: skip
    else:
        _show(library(), ways, ops, times, f"after {depth:,} tokens, threads: {threads}")
    if ops is not None and ops.failed:
        raise InputError(f"{ops.failed} operations differ from ggml's: don't use it, and report it")


def _show(
    path: Path, ways: dict[str, str], ops: Ops | None, times: list[dict[str, Any]], where: str
) -> None:
    print_pairs(("program", "loads kvpact by"), ways.items())
    if "?" in ways.values():
        explain("? was not seen to load it; `-ot none=CPU` with `-v` may show KVPACT in its log.")
    if any("-ot" in way for way in ways.values()):
        explain("-ot none=CPU is on the command line, or LLAMA_ARG_OVERRIDE_TENSOR=none=CPU.")
    if ops is None:
        explain("test-backend-ops is not in this build: no operation was compared.")
    else:
        rows = (
            ("as ggml's", ops.passed),
            ("not as ggml's", ops.failed),
            ("left to ggml", ops.left),
        )
        print_pairs(("operations", "cases"), rows)
    shown = [
        (
            literal(x["cache"]), f"{x['ms']:.2f}", f"{x['kvpact_ms']:.2f}",
            f"{x['ms'] / x['kvpact_ms']:.2f}", "yes" if x["used"] else "no",
        )
        for x in times
    ]  # fmt: skip
    if shown:
        columns = ("cache", "ms a token", "with kvpact", "times as fast", "kvpact attends")
        print_table(columns, shown, title=where)
        if any(x["cache"] == "f16" for x in times):
            explain("f16 is left to ggml unless KVPACT_GGML_F16=1 is set, which needs -fa on.")
    else:
        explain("--model model.gguf times a token with and without kvpact.")
    explain(f"loaded: {path}")
