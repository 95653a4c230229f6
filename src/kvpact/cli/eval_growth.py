"""What ``kvpact eval --budget`` runs and prints: caches with budgets over the length of a text."""

from __future__ import annotations

from pathlib import Path

from kvpact.cli import inputs
from kvpact.cli.console import explain, print_table, progress
from kvpact.cli.eval_run import RunPlan
from kvpact.evaluate import GrowthResult, grow
from kvpact.evaluate.files import write_growth
from kvpact.evaluate.growth import TITLES


def run_growth(
    plan: RunPlan, budgets: list[str], models: list[str], dtype: str, threads: int | None
) -> tuple[list[GrowthResult], list[Path]]:
    """Let every model read every text, print the tables, and write the files of a plan."""
    budgets = list(dict.fromkeys(budgets))
    for budget in budgets:
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
                        budgets,
                        plan.told,
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
