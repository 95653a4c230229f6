"""The runs and the output of ``kvpact eval``: every model reads every text."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import isfinite
from pathlib import Path
from typing import Any

from kvpact.cli import inputs
from kvpact.cli.console import explain, note, print_table, progress, say
from kvpact.evaluate import (
    Candidate,
    EvalResult,
    EvalRow,
    FreeRunningResult,
    GrowthResult,
    SummaryRow,
    TaskCase,
    differences,
    evaluate_text,
    free_running,
    grow,
    make_cases,
    report,
    score_tasks,
    summarize,
    write_report,
)
from kvpact.evaluate.base import row_name, run_name, whole_share
from kvpact.evaluate.feed import check_sizes, positions
from kvpact.evaluate.files import read_rows, shared_rows, write_growth, write_json
from kvpact.evaluate.free_running import check_steps
from kvpact.evaluate.growth import TITLES
from kvpact.evaluate.result import PROBES
from kvpact.evaluate.task_source import token_counter
from kvpact.evaluate.text import LEAST_SCORED, kl_text
from kvpact.integrations.models import first_tokens
from kvpact.methods.cautions import KEY_NORM, cautions
from kvpact.spec import parse_spec


@dataclass(frozen=True)
class RunPlan:
    """The plan of an evaluation: candidates, texts by name, sizes, baseline, output folder.

    No step means no free running, and no name of a task no tasks. `cautioned` are specs and
    recipes whose known weaknesses are printed. Without `tables` no result is printed, and with
    `verbose` how it was measured, too.
    """

    candidates: list[Candidate]
    texts: list[tuple[str, str]]
    tokens: int
    chunk: int
    against: str | None = None
    out: Path | None = None
    free_running: int = 0
    tasks: Sequence[str] = ()
    task_samples: int = 2
    seed: int = 0
    cautioned: tuple[str, ...] = ()
    calibration: Path | None = None
    tables: bool = True
    verbose: bool = False
    force: bool = False
    report: Path | None = None


def run(
    plan: RunPlan, models: list[str], dtype: str, threads: int | None
) -> tuple[list[EvalResult], list[Path]]:
    """Let every model read every text, print the tables, and write the files of a plan."""
    check_sizes(plan.tokens, plan.chunk)
    if plan.report is not None:
        inputs.check_output(plan.report, "report of kvpact eval", read_rows, plan.force)
    results = []
    written = ("eval*", "summary*", *(f"{probe}*" for probe in PROBES))
    with inputs.results_folder(plan.out, plan.force, *written):
        inputs.check_models(models)
        for name in models:
            network, tokenizer = inputs.open_model(name, dtype, threads)
            for line in known_cautions(plan.cautioned, network):
                note(line)
            known = inputs.load_calibration(plan.calibration, network)
            plan = replace(
                plan, candidates=[replace(c, calibration=known) for c in plan.candidates]
            )
            if plan.free_running:
                check_steps(plan.tokens, plan.free_running, plan.chunk, positions(network))
            # Made before anything runs: a text that is too short for tasks is refused at once.
            cases = [_cases(plan, tokenizer, text) for _, text in plan.texts]
            for (text_name, text), own in zip(plan.texts, cases, strict=True):
                names = {"model_name": name, "text_name": text_name}
                results.append(_run_one(plan, network, tokenizer, text, own, names))
                if plan.tables:
                    several = len(models) * len(plan.texts) > 1
                    show(results[-1], plan.against, heading=several, verbose=plan.verbose)
        if plan.tables and len(results) > 1:
            show_summary(summarize(results, plan.against))
        files = [] if plan.out is None else write_report(results, plan.out, against=plan.against)
        if plan.report is not None:
            files.append(write_json(plan.report, shared_rows(results)))
    return results, files


def candidates_of(
    specs: list[str], sliding: str | None = None, *, packed_only: bool, ablation: bool
) -> list[Candidate]:
    """Return the candidates of the command line, checked before anything is loaded."""
    candidates = []
    for spec in dict.fromkeys(specs):
        candidate = Candidate(spec, packed_only)
        if ablation and candidate.is_recipe:
            raise inputs.InputError(f"--ablation takes specs, and {spec} is a recipe")
        inputs.candidate_of(spec, sliding)
        if ablation and spec != "none":
            bare = parse_spec(spec).with_options(sinks=0, window=0)
            pure = Candidate(bare, exact_new=True)
            candidates += [Candidate(spec), pure, Candidate(spec, True)]
        else:
            candidates.append(candidate)
    return [replace(candidate, sliding=sliding) for candidate in candidates]


def known_cautions(specs: Sequence[str], network: Any) -> list[str]:
    """Return the known weaknesses of specs on a model, each with its specs."""
    from kvpact.integrations.transformers.model.offsets import normalises_keys

    model = [KEY_NORM] if normalises_keys(network) else []
    layers = network.config.get_text_config(decoder=True).num_hidden_layers
    found: dict[str, list[str]] = {}
    for text in specs:
        candidate = Candidate(text)
        for spec in dict.fromkeys(candidate.layers(layers)):
            for line in cautions(spec, model):
                found.setdefault(line, []).append(candidate.label)
    return [f"{', '.join(dict.fromkeys(names))}: {line}" for line, names in found.items()]


def _run_one(
    plan: RunPlan,
    network: Any,
    tokenizer: Any,
    text: str,
    cases: list[TaskCase],
    names: dict[str, str],
) -> EvalResult:
    shared: dict[str, Any] = {"chunk": plan.chunk, "seed": plan.seed}
    with progress("evaluating") as bar:
        options = {"tokens": plan.tokens, "progress": bar, **shared, **names}
        result = evaluate_text(network, plan.candidates, text, tokenizer=tokenizer, **options)
    inputs.note_if_short(result.protocol.tokens, plan.tokens)
    if plan.free_running:
        result = replace(result, free_running=_run_free(plan, network, tokenizer, text))
    if cases:
        with progress("tasks") as bar:
            found = score_tasks(network, tokenizer, cases, plan.candidates, progress=bar, **shared)
        result = replace(result, tasks=found)
    return result


def _run_free(plan: RunPlan, network: Any, tokenizer: Any, text: str) -> FreeRunningResult:
    with progress("free running") as bar:
        free = free_running(
            network,
            first_tokens(tokenizer, text, plan.tokens),
            plan.candidates,
            steps=plan.free_running,
            chunk=plan.chunk,
            tokenizer=tokenizer,
            progress=bar,
        )
    if free.steps < plan.free_running:
        note(f"the exact cache ended its text after {free.steps} of {plan.free_running} steps")
    return free


def _cases(plan: RunPlan, tokenizer: Any, text: str) -> list[TaskCase]:
    if not plan.tasks:
        return []
    count = token_counter(tokenizer)
    chosen: dict[str, Any] = {"samples": plan.task_samples, "seed": plan.seed, "tasks": plan.tasks}
    return make_cases(text, count, tokens=plan.tokens, **chosen)


SPARE = ("time\ns", "KL\np99", "MB\nhere", "change\n%", "perplex-\nity", "top-1\n%", "±")
"""Columns that a narrow terminal has no room for: the first is left out first."""
COLUMNS: dict[str, Callable[[EvalRow], str]] = {
    "of 16\nbits %": whole_share,
    "MB\nhere": lambda row: f"{row.bytes / 1e6:.2f}",
    "perplex-\nity": lambda row: f"{row.perplexity:.3f}",
    "change\n%": lambda row: f"{row.perplexity_change:+.2f}",
    "KL\nmean": lambda row: kl_text(row.kl_mean),
    "±": lambda row: kl_text(row.kl_se),
    "KL\np99": lambda row: kl_text(row.kl_p99),
    "top-1\n%": lambda row: f"{row.top1:.1f}",
    "time\ns": lambda row: f"{row.seconds:.1f}",
}


def show(result: EvalResult, against: str | None, *, heading: bool, verbose: bool) -> None:
    """Print the answer of an evaluation and its tables, and how it was measured."""
    say(result.answer)
    rows = (
        (row_name(row), result.verdict(row), *(text(row) for text in COLUMNS.values()))
        for row in result.rows
    )
    title = run_name(result.protocol) * heading
    print_table(("spec", "verdict", *COLUMNS), rows, title=title, spare=SPARE)
    if (scored := result.protocol.scored) < LEAST_SCORED:
        note(f"{scored} scored tokens tell no verdict; from {LEAST_SCORED} on there is one")
    for x in differences(result, against):
        more, times = "more" if x.kl_difference > 0 else "less", f", {x.kl_ratio:.3g} times as much"
        say(
            f"{x.spec} against {x.against}, on the same tokens: KL {kl_text(abs(x.kl_difference))} "
            f"± {kl_text(x.kl_difference_se)} {more}{times if isfinite(x.kl_ratio) else ''}"
        )
    if verbose:
        explain(report.protocol_text(result.protocol, result.rows))
    for probe in result.probes.values():
        print_table(probe.columns(), probe.lines())
        explain(probe.about())


def show_summary(rows: list[SummaryRow]) -> None:
    """Print a summary over models and texts."""
    if not rows:
        return
    columns = (column.replace("`", "") for column in report.summary_columns(rows))
    lines = ((row.spec, *report.summary_cells(row)) for row in rows)
    spare = ("±", "KL worst run", "worse", "better", "ratio")
    print_table(columns, lines, title=f"all {rows[0].runs} runs", spare=spare)
    explain(report.PAIRED)


def run_growth(
    plan: RunPlan, budgets: list[str], models: list[str], dtype: str, threads: int | None
) -> tuple[list[GrowthResult], list[Path]]:
    """Let every model read every text, print the tables, and write the files of a plan."""
    budgets = list(dict.fromkeys(budgets))
    for budget in budgets:
        inputs.candidate_of("none", budget=budget)
    results = []
    with inputs.results_folder(plan.out, plan.force, "growth*"):
        inputs.check_models(models)
        for name in models:
            network, tokenizer = inputs.open_model(name, dtype, threads)
            for text_name, text in plan.texts:
                with progress("evaluating") as bar:
                    found = grow(
                        network,
                        tokenizer,
                        text,
                        budgets,
                        plan.cautioned,
                        tokens=plan.tokens,
                        chunk=plan.chunk,
                        samples=plan.task_samples,
                        seed=plan.seed,
                        progress=bar,
                        model_name=name,
                        text_name=text_name,
                    )
                inputs.note_if_short(found.tokens, plan.tokens)
                results.append(found)
                for what in TITLES if plan.tables else ():
                    columns, lines = found.table(what)
                    print_table(columns, lines, title=found.name * (what == "kl"))
                if plan.tables and plan.verbose:
                    explain(found.about())
        return results, [] if plan.out is None else write_growth(results, plan.out)
