"""``kvpact recipes``: the recipes that are shipped, and what was measured of them."""

from __future__ import annotations

import typer

from kvpact.cli.console import output_console, table
from kvpact.data import recipe_names, recipe_path
from kvpact.evaluate.report import kl_text
from kvpact.recipe import load_recipe
from kvpact.spec import RECIPE_PREFIX


def recipes(
    name: str | None = typer.Argument(None, help="A recipe of the list, with or without recipe:."),
) -> None:
    """List the recipes that kvpact ships, or print one.

    Their names stand wherever a spec does: kvpact generate "Hello" --spec recipe:smollm2-3bit
    """
    if name is None:
        _overview()
        return
    short = name.removeprefix(RECIPE_PREFIX)
    load_recipe(RECIPE_PREFIX + short)
    typer.echo(recipe_path(short).read_text("utf-8"), nl=False)


def _overview() -> None:
    console = output_console()
    columns = "recipe|layers|of exact\n%|text|KL|KL of one\nspec|which"
    grid = table(columns.split("|"), left=1)
    for name in recipe_names():
        recipe = load_recipe(RECIPE_PREFIX + name)
        rows = recipe["measured"]["rows"]
        for own, other in zip(rows[::2], rows[1::2], strict=True):
            grid.add_row(
                RECIPE_PREFIX + name,
                str(recipe["num_layers"]),
                f"{own['percent']:.1f}",
                own["text"],
                kl_text(own["kl"]),
                kl_text(other["kl"]),
                other["spec"],
            )
    console.print(grid)
    console.print(
        "KL: mean over tokens, in nats, against the exact cache; the last two columns are the best "
        "spec for all layers in no more bytes. Recipes were made on the first text. "
        "More: kvpact recipes NAME",
        style="dim",
        highlight=False,
    )
