"""What ``kvpact eval`` and ``kvpact demo`` run: every model reads every text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from kvpact.cli.console import note, progress
from kvpact.cli.eval_tables import show, show_summary
from kvpact.cli.inputs import InputError, require, results_folder
from kvpact.cli.network import check_models, load_calibration, open_model
from kvpact.evaluate import (
    Candidate,
    EvalResult,
    FreeRunningResult,
    TaskCase,
    TaskResult,
    evaluate_text,
    free_running,
    make_cases,
    score_tasks,
    summarize,
    write_report,
)
from kvpact.evaluate.feed import check_sizes, first_tokens, positions
from kvpact.evaluate.free_running import check_steps
from kvpact.methods.cautions import KEY_NORM, cautions
from kvpact.recipe import load_recipe
from kvpact.spec import parse_spec


@dataclass(frozen=True)
class Plan:
    """What is to be evaluated: candidates, texts by name, sizes, the baseline, and where to.

    No step means no free running, and no task sample means no tasks. `told` are specs and recipes
    of which it is told what is known to do badly about them. Without `tables` nothing is printed.
    """

    candidates: list[Candidate]
    texts: list[tuple[str, str]]
    tokens: int
    chunk: int
    against: str | None = None
    out: Path | None = None
    free_running: int = 0
    task_samples: int = 0
    seed: int = 0
    told: tuple[str, ...] = ()
    calibration: Path | None = None
    tables: bool = True


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
        check_models(models)
        for name in models:
            network, tokenizer = open_model(name, dtype, threads)
            for line in known_cautions(plan.told, network):
                note(line)
            known = load_calibration(plan.calibration, network)
            plan = replace(
                plan, candidates=[replace(c, calibration=known) for c in plan.candidates]
            )
            if plan.free_running:
                check_steps(plan.tokens, plan.free_running, plan.chunk, positions(network))
            # Made before anything runs: a text that is too short for tasks is told at once.
            cases = [_cases(plan, tokenizer, text) for _, text in plan.texts]
            for (text_name, text), own in zip(plan.texts, cases, strict=True):
                names = {"model_name": name, "text_name": text_name}
                results.append(_run_one(plan, network, tokenizer, text, own, names))
                if plan.tables:
                    show(results[-1], plan.against, heading=len(models) * len(plan.texts) > 1)
        if plan.tables and len(results) > 1:
            show_summary(summarize(results, plan.against))
        files = [] if plan.out is None else write_report(results, plan.out, against=plan.against)
    return Outcome(results, files, network, tokenizer)


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
            load_recipe(spec)
        else:
            bare = parse_spec(spec).with_options(sinks=0, window=0)
            if ablation and spec != "none":
                candidates += [Candidate(spec), Candidate(bare), Candidate(spec, True)]
                continue
        candidates.append(candidate)
    return candidates


def known_cautions(specs: Sequence[str], network: Any) -> list[str]:
    """Return what is known to do badly about specs on a model, each with the specs meant.

    A large key bias is none of it: the model is there, so its caches store the bias apart.
    """
    from kvpact.integrations.transformers.offsets import normalises_keys

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
    plan: Plan,
    network: Any,
    tokenizer: Any,
    text: str,
    cases: list[TaskCase],
    names: dict[str, str],
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
            seed=plan.seed,
            **names,
        )
    held = result.protocol.tokens
    if held < plan.tokens:
        note(f"the text has {held} tokens, fewer than the {plan.tokens} asked for")
    if plan.free_running:
        free = _run_free(plan, network, tokenizer, text)
        result = replace(result, free_running=free)
    if cases:
        result = replace(result, tasks=_run_tasks(plan, network, tokenizer, cases))
    return result


def _run_free(plan: Plan, network: Any, tokenizer: Any, text: str) -> FreeRunningResult:
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
    return free


def _cases(plan: Plan, tokenizer: Any, text: str) -> list[TaskCase]:
    if not plan.task_samples:
        return []

    def count(part: str) -> int:
        return len(tokenizer(part, add_special_tokens=False)["input_ids"])

    return make_cases(text, count, tokens=plan.tokens, samples=plan.task_samples, seed=plan.seed)


def _run_tasks(plan: Plan, network: Any, tokenizer: Any, cases: list[TaskCase]) -> TaskResult:
    with progress("tasks") as report:
        return score_tasks(
            network,
            tokenizer,
            cases,
            plan.candidates,
            seed=plan.seed,
            chunk=plan.chunk,
            progress=report,
        )
