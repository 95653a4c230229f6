"""``kvpact eval``: what caches cost in quality on a real model and any text."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import typer

from kvpact.cli import options
from kvpact.cli.console import note, progress
from kvpact.cli.eval_tables import show, show_files, show_ratios, show_summary
from kvpact.cli.inputs import InputError, open_model, read_text, require, results_folder
from kvpact.data import book_path
from kvpact.evaluate import (
    Candidate,
    EvalResult,
    evaluate_text,
    free_running,
    summarize,
    write_report,
)
from kvpact.evaluate.feed import check_sizes, first_tokens, positions
from kvpact.evaluate.free_running import check_steps
from kvpact.spec import parse_spec


def evaluate_command(
    specs: list[str] = typer.Argument(
        ..., metavar="SPEC...", help="Specs such as turboquant:bits=4, or recipes (.toml, .json)."
    ),
    text: list[Path] = typer.Option(
        [],
        help="UTF-8 text file; the shipped excerpt of a book if omitted. Several may be given.",
        show_default=False,
    ),
    tokens: int = typer.Option(2048, help="Tokens of each text to use."),
    chunk: int = typer.Option(256, help="Tokens fed at a time; the first chunk is not scored."),
    model: list[str] = options.MODELS,
    out: Path | None = typer.Option(
        None, help="Folder for eval.json, eval.md and plots.", show_default=False
    ),
    against: str | None = typer.Option(
        None,
        help="Spec that the others are compared with, token by token; the first if omitted.",
        show_default=False,
    ),
    free_running_steps: int = typer.Option(
        0,
        "--free-running",
        metavar="STEPS",
        help="Also continue each text by so many single steps along the exact cache's greedy text.",
        show_default=False,
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
    """Measure perplexity, KL and top-1 agreement against the exact cache.

    With several models or texts each model reads each text, and a summary follows.
    """
    candidates = candidates_of(specs, packed_only=packed_only, ablation=ablation)
    if against is not None and against not in ("none", *(c.label for c in candidates)):
        raise InputError(f"--against {against} is not among the specs; take one of them, or none")
    if free_running_steps < 0:
        raise InputError(f"--free-running {free_running_steps} is not possible; take 1 or more")
    plan = Plan(candidates, texts_of(text), tokens, chunk, against, out, free_running_steps)
    outcome = run(plan, list(dict.fromkeys(model)), dtype, threads)
    if ablation:
        for result in outcome.results:
            show_ratios(result)
    show_files(outcome.files)


def texts_of(paths: list[Path]) -> list[tuple[str, str]]:
    """Return names and contents of texts, all of them read; the shipped book's if there are none.

    Raises
    ------
    InputError
        One of them can't be read, or is given twice.
    """
    if not paths:
        return [("northanger_abbey.txt", book_path().read_text("utf-8"))]
    if len(set(paths)) < len(paths):
        raise InputError("--text names a file twice; give each once")
    names = [path.name for path in paths]
    same = len(set(names)) < len(names)
    return [(str(path) if same else path.name, read_text(path)) for path in paths]


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


@dataclass(frozen=True)
class Plan:
    """What is to be evaluated: candidates, texts by name, sizes, the baseline, and where to."""

    candidates: list[Candidate]
    texts: list[tuple[str, str]]
    tokens: int
    chunk: int
    against: str | None = None
    out: Path | None = None
    free_running: int = 0


@dataclass(frozen=True)
class Outcome:
    """Results of all runs, the files written, and the last model with its tokenizer."""

    results: list[EvalResult]
    files: list[Path]
    model: Any
    tokenizer: Any


def run(plan: Plan, models: list[str], dtype: str, threads: int | None) -> Outcome:
    """Let every model read every text, print the tables, and write the files of a plan."""
    check_sizes(plan.tokens, plan.chunk)
    if plan.out is not None:
        require("matplotlib", extra="eval")
    results = []
    with results_folder(plan.out):
        for name in models:
            network, tokenizer = open_model(name, dtype, threads)
            if plan.free_running:
                check_steps(plan.tokens, plan.free_running, plan.chunk, positions(network))
            for text_name, text in plan.texts:
                results.append(_run_one(plan, network, tokenizer, name, text_name, text))
                show(results[-1], plan.against, heading=len(models) * len(plan.texts) > 1)
        if len(results) > 1:
            show_summary(summarize(results, plan.against))
        files = [] if plan.out is None else write_report(results, plan.out, against=plan.against)
    return Outcome(results, files, network, tokenizer)


def _run_one(
    plan: Plan, network: Any, tokenizer: Any, model: str, text_name: str, text: str
) -> EvalResult:
    with progress("evaluating") as report:
        result = evaluate_text(
            network,
            tokenizer,
            text,
            plan.candidates,
            tokens=plan.tokens,
            chunk=plan.chunk,
            progress=report,
            model_name=model,
            text_name=text_name,
        )
    held = result.protocol.tokens
    if held < plan.tokens:
        note(f"the text has {held} tokens, fewer than the {plan.tokens} asked for")
    if not plan.free_running:
        return result
    with progress("free running") as report:
        free = free_running(
            network,
            first_tokens(tokenizer, text, plan.tokens),
            plan.candidates,
            steps=plan.free_running,
            chunk=plan.chunk,
            tokenizer=tokenizer,
            progress=report,
        )
    if free.steps < plan.free_running:
        note(f"the exact cache ended its text after {free.steps} of {plan.free_running} steps")
    return replace(result, free_running=free)
