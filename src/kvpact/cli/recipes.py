"""``kvpact recipes``: the recipes that are shipped, and their measurements."""

from typing import Any

import typer

from kvpact.cli import options
from kvpact.cli.console import explain, print_document, print_table
from kvpact.data import recipe_names, recipe_path
from kvpact.recipe import load_recipe
from kvpact.spec import RECIPE_PREFIX


def recipes(
    name: str | None = typer.Argument(
        None,
        help="A recipe of the list, with or without recipe: in front.",
        autocompletion=options.complete_recipe,
    ),
    as_json: bool = options.JSON,
) -> None:
    """List the recipes that kvpact ships, or print one.

    Their names can be used in place of a spec: kvpact generate "Hello" --spec recipe:smollm2-3bit
    """
    names = recipe_names() if name is None else [name.removeprefix(RECIPE_PREFIX)]
    held = {short: dict(load_recipe(RECIPE_PREFIX + short)) for short in names}
    if as_json:
        named = ((RECIPE_PREFIX + short, recipe) for short, recipe in held.items())
        found = [{"name": name, "layers": {}, **recipe} for name, recipe in named]
        print_document("recipes", recipes=found)
    elif name is not None:
        typer.echo(recipe_path(names[0]).read_text("utf-8"), nl=False)
    else:
        _overview(held)


def _overview(held: dict[str, dict[str, Any]]) -> None:
    from kvpact.evaluate.text import kl_text

    columns = "recipe|layers|of exact\n%|text|KL|KL of one\nspec|which"
    lines = []
    for name, recipe in held.items():
        rows = recipe["measured"].get("rows", [])
        if "ladder" in recipe:
            cells = (str(recipe["num_layers"]), "-", recipe["measured"]["text"], "-", "-")
            lines.append((RECIPE_PREFIX + name, *cells, "with --budget"))
        for own, other in zip(rows[::2], rows[1::2], strict=True):
            head = (RECIPE_PREFIX + name, str(recipe["num_layers"]), f"{own['percent']:.1f}")
            kl = (kl_text(own["kl"]), kl_text(other["kl"]))
            lines.append((*head, own["text"], *kl, other["spec"]))
    print_table(columns.split("|"), lines)
    explain(
        "KL: mean over tokens, in nats, against the exact cache; the last two columns are the best "
        "spec for all layers in no more bytes. Recipes were made on the first text. "
        "More: kvpact recipes NAME"
    )
