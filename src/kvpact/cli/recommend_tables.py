"""What ``kvpact recommend`` prints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kvpact.cli.console import (
    literal,
    note,
    output_console,
    print_table,
    size_text,
    table,
)
from kvpact.evaluate.report import kl_text
from kvpact.recommend import Plan, Recommendation
from kvpact.recommend.files import RECIPE
from kvpact.recommend.verdict import VERDICTS


def show(found: Recommendation, out: Path | None) -> None:
    """Print a recommendation; `out` is the folder of its files."""
    planned, console = found.plan, output_console()
    columns = (
        "spec|slot\nbits|bytes|of exact\n%|K\npredicted|V\npredicted|KL\npredicted|KL\ncalibrated|"
        "KL\nmeasured"
    )
    grid = table(columns.split("|"))
    kl = {row.spec: kl_text(row.kl_mean) for row in found.evaluation.rows}
    exact = planned.sizes.exact
    for one in planned.measured:
        held = planned.bytes_of(one.spec)
        grid.add_row(
            one.spec,
            f"{one.slot_bits:.2f}",
            size_text(held),
            f"{100 * held / exact:.1f}",
            kl_text(sum(one.key.values())),
            kl_text(sum(one.value.values())),
            kl_text(one.predicted),
            kl_text(found.calibrated(one.spec)),
            kl.get(one.spec, "-"),
        )
    if "recipe" in kl:
        held = planned.recipe_bytes
        grid.add_row(
            "recipe",
            "-",
            size_text(held),
            f"{100 * held / exact:.1f}",
            "-",
            "-",
            kl_text(planned.recipe_predicted),
            kl_text(found.calibrated("recipe")),
            kl["recipe"],
        )
    print_table(grid)
    console.print(_about(planned), style="dim", highlight=False)
    for name in planned.left_out:
        note(f"left out: {name}")
    for line in planned.notes:
        console.print(literal(line), highlight=False)
    size = f"{size_text(found.bytes)} of {size_text(exact)} at {planned.sizes.context} tokens"
    limits = ", ".join(f"{name} up to {most:g}" for name, most in VERDICTS)
    console.print(
        literal(f"{found.verdict}: KL {kl_text(found.row.kl_mean)}, {size} ({limits})"),
        highlight=False,
    )
    if (pair := found.against_uniform) is not None:
        expected = planned.recipe_predicted - planned.of(pair.against).predicted
        measured = f"{pair.kl_difference:+.5f} ± {pair.kl_difference_se:.5f}"
        line = f"recipe less {pair.against}: {measured} measured, {expected:+.5f} predicted"
        console.print(literal(line), highlight=False)
    if found.row.spec == "recipe":
        console.print(literal(f"recipe: {_summary(planned)}"), soft_wrap=True, highlight=False)
    console.print(literal(paste_line(found.chosen, out)), soft_wrap=True, highlight=False)


def paste_line(chosen: str | dict[str, Any], out: Path | None) -> str:
    """Return the line of Python that makes the cache."""
    if isinstance(chosen, dict) and out is not None:
        chosen = str(out / RECIPE)
    source = f'"{chosen}"' if isinstance(chosen, str) else repr(chosen)
    return f"CompressedCache(model, {source})"


def _about(planned: Plan) -> str:
    sizes = planned.sizes
    stay = (
        f"; layers with a bounded window stay exact, {size_text(sizes.native)}"
        if sizes.native
        else ""
    )
    return (
        f"{len(planned.layers)} of {planned.num_layers} layers are compressed, which hold "
        f"{size_text(sizes.covered)} of the exact cache's {size_text(sizes.exact)} at "
        f"{sizes.context} tokens (16 bits a number){stay}. KL: mean over "
        f"{planned.tokens} tokens, in nats; K and V: parts of the predicted one; calibrated: by "
        "what was measured of others. "
        f"Budget: {size_text(planned.budget)}."
    )


def _summary(planned: Plan) -> str:
    by_spec: dict[str, list[str]] = {}
    for layer, spec in planned.layers.items():
        by_spec.setdefault(spec, []).append(str(layer))
    return "; ".join(f"{spec} in layers {' '.join(layers)}" for spec, layers in by_spec.items())
