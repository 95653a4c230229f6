"""The files of a recommendation: the recipe, the numbers, and a heat map of what layers cost."""

from __future__ import annotations

import json
from dataclasses import asdict
from os import PathLike
from pathlib import Path
from typing import Any

from kvpact.evaluate.verdict import VERDICTS
from kvpact.recommend.base import Recommendation
from kvpact.recommend.recipe_file import measured_row, recipe_text

RECIPE = "recipe.toml"


def write_recommendation(
    recommendation: Recommendation, directory: str | PathLike[str]
) -> list[Path]:
    """Write ``recipe.toml``, ``recommend.json`` and ``recommend.png``, and return their paths.

    The directory is made where it is missing. ``recipe.toml`` is what was chosen, for
    `CompressedCache`, with what was measured. Without matplotlib the others are written.
    """
    folder = Path(directory)
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / name for name in (RECIPE, "recommend.json", "recommend.png")]
    paths[0].write_text(_recipe(recommendation), encoding="utf-8")
    data = json.dumps(recommendation_data(recommendation), indent=2) + "\n"
    paths[1].write_text(data, encoding="utf-8")
    recommendation.plot(paths[2])
    return paths


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
    """Return what ``recommend.json`` holds."""
    plan = recommendation.plan
    rows = [asdict(row) for row in recommendation.evaluation.rows]
    difference = recommendation.against_uniform
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
        "protocol": asdict(recommendation.evaluation.protocol),
    }
