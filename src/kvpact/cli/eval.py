"""``kvpact eval``: what caches cost in quality on a real model and any text."""

from __future__ import annotations

from pathlib import Path

import typer

from kvpact.cli import options
from kvpact.cli.console import print_document, show_files
from kvpact.cli.inputs import InputError, texts_of


def evaluate_command(
    specs: list[str] = typer.Argument(
        ...,
        metavar="SPEC...",
        help="Specs such as turboquant:bits=4, or recipes (.toml, .json, recipe:NAME).",
        autocompletion=options.complete_spec,
    ),
    text: list[Path] = options.TEXTS,
    tokens: int = typer.Option(2048, help="Tokens of each text to use."),
    chunk: int = typer.Option(256, help="Tokens fed at a time; the first chunk is not scored."),
    model: list[str] = options.MODELS,
    out: Path | None = options.optional("Folder for eval.json, eval.md and plots."),
    against: str | None = options.optional(
        "Spec (or none) to compare the others with, token by token; the first if omitted."
    ),
    free_running_steps: int = typer.Option(
        0,
        "--free-running",
        metavar="STEPS",
        help="Also read this many tokens of the exact cache's greedy continuation, one by one.",
        show_default=False,
    ),
    tasks: bool = typer.Option(
        False, "--tasks", help="Also score retrieval tasks made from each text."
    ),
    task_samples: int = typer.Option(2, min=1, help="Contexts per task, with --tasks."),
    seed: int = typer.Option(0, help="Seed of the tasks, with --tasks."),
    packed_only: bool = typer.Option(
        False,
        "--packed-only",
        help="Evaluate without sinks and window, and read new tokens as stored (harsher).",
    ),
    ablation: bool = typer.Option(
        False,
        "--ablation",
        help="Evaluate each spec as given, with sinks=0,window=0, and packed only.",
    ),
    calibration: Path | None = options.CALIBRATION,
    sliding: str | None = options.SLIDING,
    verbose: bool = options.VERBOSE,
    dtype: str = options.DTYPE,
    threads: int | None = options.THREADS,
    as_json: bool = options.JSON,
) -> None:
    """Measure perplexity, KL and top-1 agreement against the exact cache.

    With several models or texts, each model reads each text, and a summary follows.
    """
    from kvpact.cli.eval_run import RunPlan, candidates_of, run
    from kvpact.evaluate.files import report_data

    candidates = candidates_of(specs, sliding, packed_only=packed_only, ablation=ablation)
    if sliding is not None and against in specs:
        against = f"{against} sliding={sliding}"  # as its row is called
    if against is not None and against not in ("none", *(c.label for c in candidates)):
        raise InputError(f"--against {against} is not among the specs; take one of them, or none")
    if free_running_steps < 0:
        raise InputError(f"--free-running {free_running_steps} is not possible; take 1 or more")
    if calibration is not None and len(set(model)) > 1:
        raise InputError("--calibration is of one model; evaluate the others without it")
    plan = RunPlan(
        candidates,
        texts_of(text),
        tokens,
        chunk,
        against,
        out,
        free_running_steps,
        task_samples if tasks else 0,
        seed,
        told=tuple(dict.fromkeys(specs)),
        calibration=calibration,
        tables=not as_json,
        verbose=verbose,
    )
    results, files = run(plan, list(dict.fromkeys(model)), dtype, threads)
    if as_json:
        data = report_data(results, against)
        print_document("eval", **data, files=[str(path) for path in files])
        return
    show_files(files)
