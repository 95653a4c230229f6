"""``kvpact methods``: what there is, with which options, at how many bits."""

from __future__ import annotations

from typing import Any

import typer

from kvpact.cli import options
from kvpact.cli.complete import complete_spec
from kvpact.cli.console import narrow, output_console, print_table, table
from kvpact.cli.document import print_document


def methods(
    name: str | None = typer.Argument(
        None, help="A method, an alias or a whole spec.", autocompletion=complete_spec
    ),
    as_json: bool = options.JSON,
) -> None:
    """List the methods, or explain one."""
    from kvpact.cli.methods_data import all_methods, one_method

    found = all_methods() if name is None else one_method(name)
    if as_json:
        print_document("methods", **found)
    elif name is None:
        _show_all(found)
    else:
        _show_one(name, found)


def _show_all(found: dict[str, list[dict[str, Any]]]) -> None:
    from kvpact.cli.methods_data import option_text

    console = output_console()
    # A narrow terminal has room for what can't be left out; the rest is in `kvpact methods NAME`.
    short = narrow(110)
    columns = ("method", "what it is", "options and defaults", "paper", "bits, D=128", "D=64")
    grid = table((*columns[:3], "bits,\nD=128") if short else columns, left=3 if short else 4)
    for one in found["methods"]:
        choices = " ".join(f"{name}={option_text(value)}" for name, value in one["options"].items())
        bits = [_bits_text(x["k"], x["v"]) for x in reversed(one["slot_bits"])]
        more = bits[:1] if short else [one["paper"] or "-", *bits]
        grid.add_row(one["name"], one["summary"], choices, *more)
    aliases = table(("alias", "stands for"), left=2)
    for one in found["aliases"]:
        aliases.add_row(one["name"], one["spec"])
    print_table(grid)
    console.print(
        "Bits per value of the packed slots at the defaults, K and V apart by a slash where they "
        "differ; exact sinks and window come on top. K and V by unlike methods: int:bits=8/kivi. "
        "More: kvpact methods NAME",
        style="dim",
        highlight=False,
    )
    print_table(aliases)
    if found["broken"]:
        broken = table(("can't be used", "why"), left=2)
        for one in found["broken"]:
            broken.add_row(one["name"], one["error"])
        print_table(broken)


def _show_one(name: str, found: dict[str, Any]) -> None:
    from kvpact.cli.methods_data import option_text

    console = output_console()
    if found["alias_of"] is not None:
        console.print(f"{name} stands for {found['alias_of']}", highlight=False)
    for one in found["methods"]:
        prefix = "" if one["side"] == "both" else f"{one['side'].upper()}: "
        console.rule(f"{prefix}{one['name']}", align="left")
        console.print(one["text"], markup=False, highlight=False)
        grid = table(("option", "type", "default", "in this spec", "meaning"), left=5)
        for x in one["options"]:
            value = "" if x["value"] == x["default"] else option_text(x["value"])
            grid.add_row(x["name"], x["type"], option_text(x["default"]), value, x["meaning"])
        print_table(grid)
    for line in found["cautions"]:
        console.print(f"caution: {line}", highlight=False, markup=False)
    console.print("packed slots, bits per value:", highlight=False)
    for x in found["slot_bits"]:
        console.print(f"  D={x['width']}: K {x['k']:.4g}, V {x['v']:.4g}", highlight=False)


def _bits_text(key: float, value: float) -> str:
    return f"{key:.4g}" if key == value else f"{key:.4g}/{value:.4g}"
