"""The files of a recommendation: the recipe, the numbers, and a plot of what each layer costs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from os import PathLike
from pathlib import Path
from typing import Any

from kvpact.evaluate.canvas import COLOURS, INK, MARKERS, log_ticks, new_figure, plain_axes
from kvpact.evaluate.verdict import VERDICTS
from kvpact.recommend.base import Measured, Recommendation
from kvpact.recommend.recipe_file import measured_row, recipe_text

RECIPE = "recipe.toml"


def write_recommendation(
    recommendation: Recommendation, directory: str | PathLike[str]
) -> list[Path]:
    """Write ``recipe.toml``, ``recommend.json`` and ``recommend.png``.

    Parameters
    ----------
    recommendation : Recommendation
        What `verify` returned.
    directory : str or path
        Made where missing; files of those names are replaced.

    Returns
    -------
    list of Path
        The files. ``recipe.toml`` is what was chosen, for `CompressedCache`, with what was
        measured.

    Raises
    ------
    OSError
        The directory can't be made or written to.
    BackendUnavailable
        matplotlib is not installed; the other files are there.
    """
    folder = Path(directory)
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / name for name in (RECIPE, "recommend.json", "recommend.png")]
    paths[0].write_text(_recipe(recommendation), encoding="utf-8")
    data = json.dumps(recommendation_data(recommendation), indent=2) + "\n"
    paths[1].write_text(data, encoding="utf-8")
    save_cost_plot(recommendation.plan.measured, paths[2])
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


def save_cost_plot(measured: Sequence[Measured], path: str | PathLike[str]) -> None:
    """Draw what K and V of each layer cost (log scales), a line a spec."""
    figure = new_figure((11, 7))
    sides = (("key", "K: predicted KL, nats per token"), ("value", "V: predicted KL"))
    for place, (side, title) in enumerate(sides):
        axes: Any = figure.add_subplot(2, 1, place + 1)
        axes.set_yscale("log")
        log_ticks(axes.yaxis)
        for index, one in enumerate(measured):
            numbers = {layer: x for layer, x in getattr(one, side).items() if x > 0}
            axes.plot(
                [str(layer) for layer in numbers],
                list(numbers.values()),
                marker=MARKERS[index % len(MARKERS)],
                color=COLOURS[index % len(COLOURS)],
                linestyle="-" if index < len(COLOURS) else "--",
                label=one.spec,
                ms=5,
            )
        axes.set_title(title, loc="left", fontsize=11, color=INK)
        plain_axes(axes)
        if place == 0:
            axes.legend(fontsize=9, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    axes.set_xlabel("layer")
    figure.savefig(path, bbox_inches="tight")
