"""``kvpact eval``: what caches cost in quality on a real model and any text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import typer

from kvpact.cli import options
from kvpact.cli.console import note, output_console, progress, table
from kvpact.cli.inputs import InputError, open_model, read_text, require, results_folder
from kvpact.data import book_path
from kvpact.evaluate import Candidate, EvalResult, EvalRow, evaluate_text, write_report
from kvpact.evaluate.base import row_name
from kvpact.evaluate.report import kl_text, protocol_text
from kvpact.evaluate.runner import check_sizes
from kvpact.spec import parse_spec


def evaluate_command(
    specs: list[str] = typer.Argument(
        ..., metavar="SPEC...", help="Specs such as turboquant:bits=4, or recipes (.toml, .json)."
    ),
    text: Path | None = typer.Option(
        None, help="UTF-8 text file; the shipped excerpt of a book if omitted.", show_default=False
    ),
    tokens: int = typer.Option(2048, help="Tokens of the text to use."),
    chunk: int = typer.Option(256, help="Tokens fed at a time; the first chunk is not scored."),
    model: str = options.MODEL,
    out: Path | None = typer.Option(
        None, help="Folder for eval.json, eval.md and eval.png.", show_default=False
    ),
    packed_only: bool = typer.Option(
        False,
        "--packed-only",
        help="Leave out sinks and window, and read new tokens as stored (harsher).",
    ),
    ablation: bool = typer.Option(
        False,
        "--ablation",
        help="Evaluate each spec as given, with sinks=0,window=0, and packed only.",
    ),
    dtype: str = options.DTYPE,
    threads: int | None = options.THREADS,
) -> None:
    """Measure perplexity, KL and top-1 agreement against the exact cache."""
    candidates = candidates_of(specs, packed_only=packed_only, ablation=ablation)
    book = book_path().read_text("utf-8") if text is None else read_text(text)
    name = "northanger_abbey.txt" if text is None else text.name
    sizes = {"tokens": tokens, "chunk": chunk, "text_name": name}
    result, files, *_ = run(candidates, book, out, model, dtype, threads, **sizes)
    if ablation:
        show_ratios(result)
    show_files(files)


def candidates_of(specs: list[str], *, packed_only: bool, ablation: bool) -> list[Candidate]:
    """Return the candidates of the command line, checked before anything is loaded.

    Raises
    ------
    SpecError, InputError
        A spec or recipe is not what it should be.
    """
    candidates = []
    for spec in dict.fromkeys(specs):
        candidate = Candidate(spec, packed_only)
        if candidate.is_recipe:
            if ablation:
                raise InputError(f"--ablation takes specs, and {spec} is a recipe")
            if not Path(spec).is_file():
                raise InputError(f"{spec}: no such recipe; give a file")
        else:
            bare = parse_spec(spec).with_options(sinks=0, window=0)
            if ablation and spec != "none":
                candidates += [Candidate(spec), Candidate(bare), Candidate(spec, True)]
                continue
        candidates.append(candidate)
    return candidates


def run(
    candidates: list[Candidate],
    text: str,
    out: Path | None,
    model: str,
    dtype: str,
    threads: int | None,
    **sizes: Any,
) -> tuple[EvalResult, list[Path], Any, Any]:
    """Evaluate on a text, write the files where `out` is given, and print the table.

    `sizes` are ``tokens``, ``chunk`` and ``text_name`` of `evaluate_text`. Returns the files, the
    model and its tokenizer beside the result.
    """
    check_sizes(sizes["tokens"], sizes["chunk"])
    if out is not None:
        require("matplotlib", extra="eval")
    with results_folder(out):
        network, tokenizer = open_model(model, dtype, threads)
        with progress("evaluating") as report:
            result = evaluate_text(
                network, tokenizer, text, candidates, progress=report, model_name=model, **sizes
            )
        files = write_report(result, out) if out is not None else []
    held, wanted = result.protocol.tokens, sizes["tokens"]
    if held < wanted:
        note(f"the text has {held} tokens, fewer than the {wanted} asked for")
    show(result)
    return result, files, network, tokenizer


def show_files(files: list[Path]) -> None:
    """Print which files were written, if any."""
    if files:
        output_console().print(
            "written: " + ", ".join(map(str, files)), soft_wrap=True, highlight=False
        )


def show(result: EvalResult) -> None:
    """Print the table of an evaluation, and how it was measured."""
    columns = "spec|bits/\nvalue|MB|perplex-\nity|change\n%|KL\nmean|KL\np99|top-1\n%|time\ns"
    grid = table(columns.split("|"))
    for row in result.rows:
        grid.add_row(
            row_name(row),
            f"{row.bits_per_value:.2f}",
            f"{row.bytes / 1e6:.2f}",
            f"{row.perplexity:.3f}",
            f"{row.perplexity_change:+.2f}",
            kl_text(row.kl_mean),
            kl_text(row.kl_p99),
            f"{row.top1:.1f}",
            f"{row.seconds:.1f}",
        )
    console = output_console()
    console.print(grid)
    console.print(protocol_text(result.protocol, result.rows), style="dim", highlight=False)


def show_ratios(result: EvalResult) -> None:
    """Print how much more KL a spec costs without sinks and window, and packed only."""
    grid = table(("spec", "KL mean", "sinks=0,window=0", "packed only"), title="KL over the spec's")
    rows = [row for row in result.rows if row.spec != "none"]
    for start in range(0, len(rows) - 2, 3):
        full, bare, packed = rows[start : start + 3]
        grid.add_row(full.spec, kl_text(full.kl_mean), _ratio(bare, full), _ratio(packed, full))
    output_console().print(grid)


def _ratio(row: EvalRow, base: EvalRow) -> str:
    return f"x {row.kl_mean / base.kl_mean:.2f}" if base.kl_mean > 0 else "-"
