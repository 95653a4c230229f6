"""The files of a recommendation: the recipe, the numbers, and a heat map of costs by layer."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from os import PathLike
from pathlib import Path
from typing import Any

from kvpact.evaluate import EvalRow
from kvpact.evaluate.text import VERDICTS
from kvpact.recommend.base import RecipePlan, Recommendation

RECIPE, LADDER = "recipe.toml", "ladder.toml"


def write_recommendation(
    recommendation: Recommendation, directory: str | PathLike[str]
) -> list[Path]:
    """Write ``recipe.toml``, ``recommend.json``, the plot and ``ladder.toml``; return the paths.

    The directory is made where it is missing. ``recipe.toml`` is what was chosen, for
    `CompressedCache`, with what was measured; ``ladder.toml`` is for one with a budget of bytes.
    Without matplotlib all but ``recommend.png`` are written.
    """
    folder = Path(directory)
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / name for name in (RECIPE, "recommend.json", "recommend.png", LADDER)]
    paths[0].write_text(_recipe(recommendation), encoding="utf-8")
    data = json.dumps(recommendation_data(recommendation), indent=2) + "\n"
    paths[1].write_text(data, encoding="utf-8")
    protocol = recommendation.evaluation.protocol
    head = ("Exact at first; what goes first within a budget.", "Measured by kvpact recommend.")
    ladder = ladder_text(recommendation.plan, head, protocol.model, protocol.text)
    paths[3].write_text(ladder, encoding="utf-8")
    recommendation.plot(paths[2])
    return paths


def ladder_text(plan: RecipePlan, head: Sequence[str], model: str, text: str) -> str:
    """Return the TOML of a recipe that begins exact and has a ladder of costs by layer."""
    measured = {"model": model, "text": text, "tokens": plan.tokens}
    return recipe_text("none", plan.num_layers, head, measured, plan.ladder)


def _recipe(recommendation: Recommendation) -> str:
    plan, protocol = recommendation.plan, recommendation.evaluation.protocol
    rows = [
        measured_row(plan, row, protocol.text, plan.recipe if row.spec == "recipe" else row.spec)
        for row in recommendation.evaluation.rows
        if row.spec != "none"
    ]
    about = {"model": protocol.model, "tokens": protocol.tokens, "context": plan.sizes.context}
    percent = 100 * recommendation.bytes / plan.sizes.exact
    head = f"{percent:.1f} % of the 16-bit cache at {plan.sizes.context:,} tokens."
    return recipe_text(
        recommendation.chosen,
        plan.num_layers,
        (head, "Made and measured by kvpact recommend."),
        {**about, "rows": rows},
    )


def recommendation_data(recommendation: Recommendation) -> dict[str, Any]:
    """Return the contents of ``recommend.json``."""
    plan = recommendation.plan
    rows = [asdict(row) for row in recommendation.evaluation.rows]
    difference, tools = recommendation.against_uniform, recommendation.tools
    return {
        "chosen": recommendation.chosen,
        "bytes": recommendation.bytes,
        "kl_mean": recommendation.row.kl_mean,
        "kl_predicted": recommendation.predicted_of(recommendation.row.spec),
        "kl_calibrated": recommendation.calibrated(recommendation.row.spec),
        "verdict": recommendation.verdict,
        "verdicts": dict(VERDICTS),
        "budget": plan.budget,
        "exact": {**asdict(plan.sizes), "bytes": plan.sizes.exact},
        "recipe": plan.recipe,
        "recipe_bytes": plan.recipe_bytes,
        "recipe_predicted": plan.recipe_predicted,
        "recipe_against_uniform": difference and asdict(difference),
        "uniform": plan.uniform,
        "notes": list(plan.notes),
        "left_out": list(plan.left_out),
        "predicted_tokens": plan.tokens,
        "measured": [
            {
                **asdict(x),
                "bytes": plan.bytes_of(x.spec),
                "predicted": x.predicted,
                "calibrated": recommendation.calibrated(x.spec),
            }
            for x in plan.measured
        ],
        "verified": rows,
        "tools": tools if isinstance(tools, str) else tools.data(),
        "protocol": asdict(recommendation.evaluation.protocol),
    }


def measured_row(
    plan: RecipePlan,
    row: EvalRow,
    text: str,
    source: str | Mapping[str, Any],
    *,
    made_of_it: bool = True,
) -> dict[str, Any]:
    """Return a recipe's row on a text, with ``kl_predicted`` if the plan was `made_of_it`."""
    own = source == plan.recipe
    held = plan.recipe_bytes if own else plan.bytes_of(str(source))
    kl = plan.recipe_predicted if own else plan.of(str(source)).predicted
    predicted = {"kl_predicted": _rounded(kl)} if made_of_it else {}
    return {
        "spec": source if isinstance(source, str) else "recipe",
        "text": text,
        "percent": round(100 * held / plan.sizes.exact, 1),
        **predicted,
        "kl": _rounded(row.kl_mean),
        "kl_se": _rounded(row.kl_se),
    }


def recipe_text(
    recipe: str | Mapping[str, Any],
    num_layers: int,
    head: Sequence[str],
    measured: Mapping[str, Any],
    ladder: Mapping[str, Sequence[float]] | None = None,
) -> str:
    """Return a recipe's TOML: one spec, or `RecipePlan.recipe`; tables ``measured``, ``ladder``."""
    whole: Mapping[str, Any]
    whole = {"default": recipe, "layers": {}} if isinstance(recipe, str) else recipe
    lines = [f"# {line}" for line in head]
    lines += [f"default = {_value(whole['default'])}", f"num_layers = {num_layers}"]
    if whole["layers"]:
        lines += ["", "[layers]"]
        lines += [f"{layer} = {_value(spec)}" for layer, spec in whole["layers"].items()]
    if ladder is not None:
        lines += ["", "[ladder]"]
        lines += [f"{side} = {json.dumps(costs)}" for side, costs in ladder.items()]
    lines += ["", "[measured]"]
    lines += [f"{name} = {_value(x)}" for name, x in measured.items() if name != "rows"]
    if "rows" not in measured:
        return "\n".join(lines) + "\n"
    lines += ["rows = ["]
    for row in measured["rows"]:
        lines.append("    {" + ", ".join(f"{name} = {_value(x)}" for name, x in row.items()) + "},")
    return "\n".join([*lines, "]"]) + "\n"


def _value(value: str | int | float) -> str:
    """Return a text or number in TOML, whose texts in quotation marks are those of JSON."""
    return json.dumps(value) if isinstance(value, str) else repr(value)


def _rounded(number: float) -> float:
    return float(f"{number:.3g}")
