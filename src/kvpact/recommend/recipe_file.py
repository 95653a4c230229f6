"""The file of a recipe, with what was measured of it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from kvpact.evaluate import EvalRow
from kvpact.recommend.base import Plan


def measured_row(
    plan: Plan,
    row: EvalRow,
    text: str,
    source: str | Mapping[str, Any],
    *,
    made_of_it: bool = True,
) -> dict[str, Any]:
    """Return what a recipe's file tells of an evaluation: one line of its table.

    `made_of_it`: whether the plan was made of this text: predictions are for that one alone.
    Returns ``spec``, ``text``, ``percent`` (of the 16-bit cache's bytes at the plan's context),
    ``kl_predicted`` (if `made_of_it`), ``kl`` and ``kl_se``, in nats per token.
    """
    own = source == plan.recipe
    held = plan.recipe_bytes if own else plan.bytes_of(str(source))
    told = plan.recipe_predicted if own else plan.of(str(source)).predicted
    predicted = {"kl_predicted": _rounded(told)} if made_of_it else {}
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
) -> str:
    """Return the TOML of a recipe (see `kvpact.recipe`).

    `recipe`: a spec for all layers, or a recipe of `Plan.recipe`'s form. `num_layers`: layers of
    the model; caches of other models refuse it. `measured`: the table ``measured``: texts and
    numbers, and ``rows`` of them.
    """
    whole: Mapping[str, Any]
    whole = {"default": recipe, "layers": {}} if isinstance(recipe, str) else recipe
    lines = [f"# {line}" for line in head]
    lines += [f"default = {_value(whole['default'])}", f"num_layers = {num_layers}"]
    if whole["layers"]:
        lines += ["", "[layers]"]
        lines += [f"{layer} = {_value(spec)}" for layer, spec in whole["layers"].items()]
    lines += ["", "[measured]"]
    lines += [f"{name} = {_value(x)}" for name, x in measured.items() if name != "rows"]
    lines += ["rows = ["]
    for row in measured["rows"]:
        lines.append("    {" + ", ".join(f"{name} = {_value(x)}" for name, x in row.items()) + "},")
    return "\n".join([*lines, "]"]) + "\n"


def _value(value: str | int | float) -> str:
    """Return a text or number in TOML, whose texts in quotation marks are those of JSON."""
    return json.dumps(value) if isinstance(value, str) else repr(value)


def _rounded(number: float) -> float:
    return float(f"{number:.3g}")
