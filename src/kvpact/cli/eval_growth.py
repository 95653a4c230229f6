"""What ``kvpact eval --budget`` runs and prints: caches with budgets over the length of a text."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from kvpact.cli import inputs
from kvpact.cli.console import explain, print_document, print_table, progress, show_files
from kvpact.evaluate import GrowthResult, grow
from kvpact.evaluate.files import write_growth
from kvpact.evaluate.growth import CHUNK, TITLES


@dataclass(frozen=True)
class GrowthPlan:
    """Budgets, other specs, texts by name, sizes, and where to and how results are shown."""

    budgets: list[str]
    specs: list[str]
    texts: list[tuple[str, str]]
    tokens: int
    chunk: int | None
    samples: int
    seed: int
    out: Path | None
    as_json: bool
    verbose: bool


def run_growth(plan: GrowthPlan, models: list[str], dtype: str, threads: int | None) -> None:
    """Let every model read every text, print the tables, and write the files of a plan."""
    for spec in plan.specs:
        inputs.candidate_of(spec)
    for budget in plan.budgets:
        inputs.candidate_of("none", budget=budget)
    results = []
    with inputs.results_folder(plan.out):
        inputs.check_models(models)
        for name in models:
            network, tokenizer = inputs.open_model(name, dtype, threads)
            for text_name, text in plan.texts:
                with progress("evaluating") as bar:
                    found = grow(
                        network,
                        tokenizer,
                        text,
                        plan.budgets,
                        plan.specs,
                        tokens=plan.tokens,
                        chunk=CHUNK if plan.chunk is None else plan.chunk,
                        samples=plan.samples,
                        seed=plan.seed,
                        progress=bar,
                        model_name=name,
                        text_name=text_name,
                    )
                inputs.note_if_short(found.tokens, plan.tokens)
                results.append(found)
                if not plan.as_json:
                    _show(found, plan.verbose)
        files = [] if plan.out is None else write_growth(results, plan.out)
    if plan.as_json:
        empty: dict[str, list[object]] = {
            "rows": [],
            "summary": [],
            "free_running": [],
            "tasks": [],
        }
        growth = [result.data() for result in results]
        print_document("eval", **empty, growth=growth, files=[str(path) for path in files])
        return
    show_files(files)


def _show(result: GrowthResult, verbose: bool) -> None:
    for what in TITLES:
        columns, lines = result.table(what)
        print_table(columns, lines, title=result.name * (what == "kl"))
    if verbose:
        explain(result.about())
