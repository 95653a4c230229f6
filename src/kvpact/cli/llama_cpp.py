"""``kvpact llama-cpp``: attention of llama.cpp by a backend that is loaded into it."""

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
    say,
)
from kvpact.cli.inputs import InputError

if TYPE_CHECKING:
    from kvpact.integrations.llama_cpp.places import Tried
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
        "`kvpact llama-cpp check WHERE` tells whether yours do."
    )


def check(
    where: str = typer.Argument(
        ...,
        help="Program or build of llama.cpp, a Python module's name, a folder with node_modules.",
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
    """Load kvpact into a llama.cpp: what loads it, whether it is right, what it saves."""
    from kvpact.integrations.llama_cpp import library, places, programs

    found = programs.programs(Path(where)) if Path(where).exists() else {}
    if model is not None and "llama-bench" not in found:
        raise InputError(f"--model needs llama-bench, which is not in {where}")
    if not found:
        _check_places(places.tried(where), library(), as_json)
        return
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


def _check_places(tried: list[Tried], path: Path, as_json: bool) -> None:
    """Print what became of each ggml; `InputError` where all of them refuse."""
    if as_json:
        print_document("llama-cpp check", library=str(path), ggmls=[x._asdict() for x in tried])
    for one in () if as_json else tried:
        loads = f"loads kvpact: {one.found}\n  by {one.line}"
        say(f"{one.folder}\n  " + (f"no kvpact: {one.refused}" if one.refused else loads))
        if one.gpu:
            say(f"  layers on the GPU ({', '.join(one.gpu)}) keep their caches and attention there")
    if all(one.refused for one in tried):
        raise InputError("; ".join(dict.fromkeys(one.refused for one in tried)))
    if not as_json:
        explain("It is used where flash attention is on and the cache is quantised (q8_0).")
        explain("KVPACT_GGML_COUNT=1 and enable().attentions count: 0 is loaded and not used.")


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
