"""Predicted against measured KL, and recipes against uniform specs of as many bytes.

For each model and text: one survey; for each uniform spec a recipe of at most its bytes at the
context; then one evaluation of all of them. ``--model`` and ``--text`` take several values;
``topics`` is Python's language reference, as `pydoc_data` ships it.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import runner
import torch

from kvpact.data import book_path
from kvpact.evaluate import evaluate
from kvpact.evaluate.metrics import mean_and_error
from kvpact.evaluate.text import kl_text, markdown
from kvpact.integrations.models import first_tokens, load_model
from kvpact.recommend import plan, survey

UNIFORM = ("trellis:bits=2", "trellis:bits=3", "trellis:bits=4")
COLUMNS = (
    "model", "text", "spec", "of exact %", "predicted", "measured", "±", "predicted / measured",
    "calibrated / measured",
)  # fmt: skip
PAIRS = ("model", "text", "bytes of", "recipe less it", "±", "predicted", "worse than ±")


def text_of(name: str) -> str:
    """Return a text: the shipped book, Python's reference, or a file."""
    if name == "novel":
        return book_path().read_text("utf-8")
    if name == "topics":
        return "\n".join(topics[key] for key in sorted(topics))
    return Path(name).read_text("utf-8")


def compare(model: str, text: str, tokens: int, specs: Sequence[str]) -> list[dict[str, Any]]:
    """Return a row for each uniform spec and its recipe."""
    network, tokenizer = load_model(model)
    ids, surveys = first_tokens(tokenizer, text_of(text), tokens), []
    seconds = runner.turn_of(lambda: surveys.append(survey(network, ids)))()
    (found,) = surveys
    plans = [plan(found, budget=spec) for spec in specs]
    sources = [x for p, s in zip(plans, specs, strict=True) for x in (s, p.recipe)]
    result = evaluate(network, ids, sources)
    found, scores, rows = iter(result.rows[1:]), iter(result.scores[1:]), []
    for planned, spec in zip(plans, specs, strict=True):
        difference = mean_and_error(-next(scores).kl + next(scores).kl)
        uniform, made = planned.of(spec).predicted, planned.recipe_predicted
        for name, recipe, held, predicted, (more, error) in (
            (spec, None, planned.bytes_of(spec), uniform, (None, None)),
            (f"recipe within {spec}", planned.recipe, planned.recipe_bytes, made, difference),
        ):
            row = next(found)
            what = {"model": model, "text": text, "tokens": len(ids), "spec": name}
            what |= {"recipe": recipe, "share": held / planned.sizes.exact, "predicted": predicted}
            what |= {"measured": row.kl_mean, "measured_se": row.kl_se, "difference": more}
            rows.append({**what, "difference_se": error, "survey_seconds": seconds})
    return rows


def report(rows: Sequence[dict[str, Any]]) -> str:
    """Return both tables in Markdown."""
    first, second = [], []
    for place, row in enumerate(rows):
        other = rows[place - 1 if place % 2 else place + 1]  # the level is calibrated by this one
        kls = [row[name] for name in ("predicted", "measured", "measured_se")]
        ratio, level = row["predicted"] / row["measured"], other["measured"] / other["predicted"]
        alike = row["measured"] == other["measured"]  # the recipe is the spec itself
        spec = row["spec"] if row["recipe"] else f"`{row['spec']}`"
        cells = [row["model"], row["text"], spec, f"{100 * row['share']:.1f}", *map(kl_text, kls)]
        first.append([*cells, f"{ratio:.2f}", "-" if alike else f"{ratio * level:.2f}"])
    for uniform, recipe in zip(rows[::2], rows[1::2], strict=True):
        worse = recipe["difference"] > recipe["difference_se"]
        more = recipe["predicted"] - uniform["predicted"]
        figures = f"{recipe['difference']:+.5f}", kl_text(recipe["difference_se"]), f"{more:+.5f}"
        place = recipe["model"], recipe["text"], f"`{uniform['spec']}`"
        second.append([*place, *figures, "yes" if worse else "no"])
    return markdown(COLUMNS, first, 3) + "\n\n" + markdown(PAIRS, second, 3) + "\n"


def main() -> None:
    options = runner.arguments(
        __doc__, model=["smollm2", "gemma3"], text=["novel", "topics"], tokens=2048, threads=2,
        out=Path("build/recommend"),
    )  # fmt: skip
    torch.set_num_threads(options.threads)
    options.out.mkdir(parents=True, exist_ok=True)
    rows: list[dict[str, Any]] = []
    for model in options.model:
        for text in options.text:
            rows += compare(model, text, options.tokens, UNIFORM)
            print(report(rows), flush=True)
            (options.out / "recommend.json").write_text(json.dumps(rows, indent=2) + "\n", "utf-8")
            (options.out / "recommend.md").write_text(report(rows), "utf-8")


if __name__ == "__main__":
    main()
