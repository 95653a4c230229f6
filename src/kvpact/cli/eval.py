"""``kvpact eval``: the cost of caches in quality, on a real model and any text."""

from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from kvpact.cli import options
from kvpact.cli.console import note, print_document, show_files
from kvpact.cli.inputs import InputError, texts_of

if TYPE_CHECKING:
    from kvpact.evaluate import EvalResult, GrowthResult


def evaluate_command(
    specs: list[str] = typer.Argument(
        [],
        metavar="SPEC...",
        help="Specs such as turboquant:bits=4, or recipes (.toml, .json, recipe:NAME).",
        show_default=False,
        autocompletion=options.complete_spec,
    ),
    text: list[Path] = options.TEXTS,
    tokens: int | None = options.optional(
        "Tokens of each text to use: 2305 if omitted, of which 2048 are scored; 2048 with --budget."
    ),
    chunk: int | None = options.optional(
        "Tokens fed at a time, 256 if omitted, 64 with --budget; the first chunk is not scored."
    ),
    model: list[str] = options.MODELS,
    out: Path | None = typer.Option(
        None, *options.OUT, show_default=False, help="Folder for eval.json, eval.md and plots."
    ),
    report: Path | None = options.optional(
        metavar="FILE", help="Also write a row for each cache as JSON, to be handed on."
    ),
    force: bool = options.FORCE,
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
    tasks: str | None = options.optional(
        metavar="NAMES",
        help="Also score tasks made from each text: all, or names such as needle,tools.",
    ),
    task_samples: int = typer.Option(2, min=1, help="Contexts per task, with --tasks or --budget."),
    seed: int = typer.Option(0, help="Seed of the tasks, with --tasks or --budget."),
    budget: str | None = options.optional(
        metavar="BYTES[,BYTES...]",
        help="Measure caches with these budgets of bytes (24MB,12MB) over the length, and what "
        "else fits them.",
    ),
    packed_only: bool = typer.Option(
        False,
        "--packed-only",
        help="Evaluate without sinks and window, and read new tokens as stored (harsher).",
    ),
    exact_new: bool = typer.Option(
        False,
        "--exact-new",
        help="Let tokens of a chunk read one another exactly without a window, too: less than "
        "decoding loses.",
    ),
    ablation: bool = typer.Option(
        False,
        "--ablation",
        help="Evaluate each spec as given, with sinks=0,window=0 and a chunk's own tokens exact, "
        "and packed only.",
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
    from kvpact.cli.eval_run import RunPlan, candidates_of, run, run_growth
    from kvpact.evaluate.files import report_data
    from kvpact.evaluate.growth import CHUNK
    from kvpact.evaluate.runner import TOKENS
    from kvpact.evaluate.tasks import task_names

    models = list(dict.fromkeys(model))
    if budget is not None:
        others: dict[str, object] = {"--against": against, "--free-running": free_running_steps}
        others |= {"--tasks": tasks, "--packed-only": packed_only, "--ablation": ablation}
        others |= {"--calibration": calibration, "--sliding": sliding, "--exact-new": exact_new}
        others |= {"--report": report}
        if used := [name for name, value in others.items() if value]:
            raise InputError(f"{' and '.join(used)} can't go with --budget: leave it out")
    elif not specs:
        raise InputError("there is nothing to evaluate; give a SPEC, or --budget")
    if chunk is None:
        chunk = 256 if budget is None else CHUNK
    if tokens is None:
        tokens = TOKENS if budget is None else 2048
    candidates = candidates_of(specs, sliding, packed_only=packed_only, ablation=ablation)
    if numbers := " ".join(x for x in specs if x.isdecimal()):
        note(f"{numbers}, a number alone, is a spec: so many bits of the default method")
    if exact_new:
        candidates = [replace(c, exact_new=True) for c in candidates]
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
        [] if tasks is None else task_names(tasks.split(",")),
        task_samples,
        seed,
        cautioned=tuple(dict.fromkeys(specs)),
        calibration=calibration,
        tables=not as_json,
        verbose=verbose,
        force=force,
        report=report,
    )
    growth: list[GrowthResult] = []
    results: list[EvalResult] = []
    if budget is None:
        results, files = run(plan, models, dtype, threads)
    else:
        growth, files = run_growth(plan, budget.split(","), models, dtype, threads)
    if as_json:
        data = report_data(results, against)
        data["growth"] = [asdict(result) for result in growth]
        print_document("eval", **data, files=[str(path) for path in files])
        return
    show_files(files)
