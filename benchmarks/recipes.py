"""The recipes that kvpact ships: made on one text, measured on that and on another.

N bits are the bytes of ``trellis:bits=N`` in all layers, 2.5 bits halfway between. Recipes are
those of ``kvpact recommend MODEL --budget trellis:bits=N``, made on the novel; ``topics`` is
Python's language reference, of which they know nothing.
"""

from pathlib import Path
from typing import Any

import runner
import torch

from kvpact.evaluate import evaluate
from kvpact.integrations.models import first_tokens, load_model
from kvpact.recommend import RecipePlan, plan, survey
from kvpact.recommend.files import ladder_text, measured_row, recipe_text
from recommend import text_of

FOLDER = Path(__file__).parents[1] / "src" / "kvpact" / "data" / "recipes"
MODELS = {"smollm2": "SmolLM2-135M-Instruct", "gemma3": "Gemma 3 270M (4-bit weights)"}
TEXTS = ("novel", "topics")


def plans_of(network: Any, ids: torch.Tensor) -> dict[str, RecipePlan]:
    """Return a plan for each size, from one survey."""
    found = survey(network, ids)
    two, three, four = (plan(found, budget=f"trellis:bits={bits}") for bits in (2, 3, 4))
    middle = plan(found, budget=str((two.budget + three.budget) // 2))
    return {"2.5bit": middle, "3bit": three, "4bit": four}


def rows_of(
    plans: dict[str, RecipePlan], results: dict[str, Any]
) -> dict[str, list[dict[str, Any]]]:
    """Return the measured table of each recipe."""
    tables: dict[str, list[dict[str, Any]]] = {name: [] for name in plans}
    for text, result in results.items():
        rows = iter(result.rows[1:])
        for name, one in plans.items():
            for source in (one.recipe, one.uniform):
                given = one, next(rows), text, source
                tables[name].append(measured_row(*given, made_of_it=text == TEXTS[0]))
    return tables


def write(model: str, tokens: int, folder: Path) -> None:
    """Make and write the recipes of a model."""
    network, tokenizer = load_model(model)
    ids = {text: first_tokens(tokenizer, text_of(text), tokens) for text in TEXTS}
    plans = plans_of(network, ids[TEXTS[0]])
    made = f"Measured by: python benchmarks/recipes.py --model {model}"
    full_name = MODELS.get(model, model)
    head = f"{full_name}: exact at first; what goes first within a budget.", made
    ladder = ladder_text(next(iter(plans.values())), head, model, TEXTS[0])
    (folder / f"{Path(model).name}-budget.toml").write_text(ladder, "utf-8")
    sources = [source for one in plans.values() for source in (one.recipe, one.uniform)]
    results = {text: evaluate(network, ids[text], sources) for text in TEXTS}
    tables = rows_of(plans, results)
    for name, one in plans.items():
        percent, context = 100 * one.recipe_bytes / one.sizes.exact, one.sizes.context
        head = (
            f"{full_name}: {percent:.1f} % of the 16-bit cache at {context:,} tokens.",
            f"Made and m{made[1:]}",
        )
        about = {"model": model, "tokens": tokens, "context": context}
        text = recipe_text(one.recipe, one.num_layers, head, {**about, "rows": tables[name]})
        (folder / f"{Path(model).name}-{name}.toml").write_text(text, "utf-8")
        print(text, flush=True)


def main() -> None:
    options = runner.arguments(__doc__, model=[*MODELS], tokens=2048, threads=2, out=FOLDER)
    torch.set_num_threads(options.threads)
    options.out.mkdir(parents=True, exist_ok=True)
    for model in options.model:
        write(model, options.tokens, options.out)


if __name__ == "__main__":
    main()
