"""``kvpact recommend``: which spec or recipe suits a model and a budget."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from kvpact.cli import options
from kvpact.cli.console import (
    explain,
    literal,
    output_console,
    print_document,
    print_table,
    progress,
    show_files,
    size_text,
    table,
)
from kvpact.cli.inputs import (
    InputError,
    check_models,
    note_if_short,
    open_model,
    require,
    results_folder,
    texts_of,
)

if TYPE_CHECKING:
    from kvpact.recommend import Plan, Recommendation

CHUNK = 256
TOKENS, QUICK_TOKENS = 2048, 768


def recommend_command(
    model: str = options.MODEL_ARGUMENT,
    text: Path | None = options.optional(
        "UTF-8 text file; the shipped excerpt of a book if omitted."
    ),
    context: int = typer.Option(32_768, help="Context length for which bytes are counted."),
    budget: str = typer.Option(
        "30%",
        help="Bytes that the cache may take: a share of the 16-bit cache (30%), a size (4GB), or a "
        "spec, for as many bytes as it takes.",
        autocompletion=options.complete_spec,
    ),
    quick: bool = typer.Option(False, "--quick", help=f"Use {QUICK_TOKENS} tokens of text."),
    tokens: int | None = options.optional(f"Tokens of text to use; {TOKENS} if omitted."),
    out: Path | None = options.optional("Folder for recipe.toml, recommend.json and a plot."),
    verbose: bool = typer.Option(False, "--verbose", help="Print how it was measured, too."),
    dtype: str = options.DTYPE,
    threads: int | None = options.THREADS,
    as_json: bool = options.JSON,
) -> None:
    """Recommend a spec, or a recipe by layer: gradients predict KL, one evaluation verifies.

    Bytes are counted for one sequence of --context tokens.
    """
    from kvpact.evaluate.feed import check_sizes, first_tokens, positions
    from kvpact.recommend import budget_bytes, plan, survey, verify, write_recommendation
    from kvpact.recommend.budget import is_spec
    from kvpact.recommend.files import recommendation_data

    ((text_name, content),) = texts_of([] if text is None else [text])
    if tokens is None:
        tokens = QUICK_TOKENS if quick else TOKENS
    if context < 1:
        raise InputError(f"--context {context} is not possible; take 1 or more")
    check_sizes(tokens, CHUNK)
    if not is_spec(budget):
        budget_bytes(budget, 0)  # a misspelt one is told before a model is loaded
    if out is not None:
        require("matplotlib", extra="eval")
    with results_folder(out):
        check_models([model])
        network, tokenizer = open_model(model, dtype, threads)
        check_sizes(tokens, CHUNK, positions(network))
        ids = first_tokens(tokenizer, content, tokens)
        check_sizes(len(ids), CHUNK)
        note_if_short(len(ids), tokens)
        with progress("predicting") as report:
            found = survey(network, ids, chunk=CHUNK, progress=report)
        planned = plan(found, context=context, budget=budget)
        with progress("verifying") as report:
            names = {"model_name": model, "text_name": text_name}
            verified = verify(network, ids, planned, chunk=CHUNK, progress=report, **names)
        files = [] if out is None else write_recommendation(verified, out)
    if as_json:
        data = recommendation_data(verified)
        print_document("recommend", **data, files=[str(path) for path in files])
        return
    show(verified, out, verbose=verbose)
    show_files(files)


def show(found: Recommendation, out: Path | None, *, verbose: bool) -> None:
    """Print the answer, then what was compared; `out` is the folder of its files."""
    from kvpact.evaluate.text import kl_text

    planned, exact, kl = found.plan, found.plan.sizes.exact, kl_text(found.row.kl_mean)
    size = f"{size_text(found.bytes)} of {size_text(exact)} at {planned.sizes.context:,} tokens"
    say(f"{found.verdict}: KL {kl}, {size} ({100 * found.bytes / exact:.1f} % of an exact cache)")
    say(paste_line(found.chosen, out))
    if found.row.spec == "recipe":
        layers: dict[str, list[str]] = {}
        for layer, spec in planned.layers.items():
            layers.setdefault(spec, []).append(str(layer))
        each = (f"{spec} in layers {' '.join(where)}" for spec, where in layers.items())
        say(f"recipe: {'; '.join(each)}")
    _compared(found)
    if not verbose:
        return
    from kvpact.evaluate.verdict import VERDICTS

    explain(_about(planned))
    limits = ", ".join(f"{name} up to {most:g}" for name, most in VERDICTS)
    for line in (*(f"left out: {x}" for x in planned.left_out), *planned.notes, f"KL: {limits}"):
        say(line)
    if (pair := found.against_uniform) is not None:
        expected = planned.recipe_predicted - planned.of(pair.against).predicted
        measured = f"{pair.kl_difference:+.5f} ± {pair.kl_difference_se:.5f}"
        say(f"recipe less {pair.against}: {measured} measured, {expected:+.5f} predicted")


def say(line: str) -> None:
    """Print a line as it is, however long."""
    output_console().print(literal(line), soft_wrap=True, highlight=False)


def _compared(found: Recommendation) -> None:
    """Print the table of specs, from the least predicted KL to the largest."""
    from kvpact.evaluate.text import kl_text

    planned, exact = found.plan, found.plan.sizes.exact
    columns = (
        "spec|slot\nbits|bytes|of exact\n%|K\npredicted|V\npredicted|KL\npredicted|KL\ncalibrated|"
        "KL\nmeasured"
    )
    grid = table(columns.split("|"))
    kl = {row.spec: kl_text(row.kl_mean) for row in found.evaluation.rows}

    def add(spec: str, bits: str, held: int, key: str, value: str, predicted: float) -> None:
        share, own = f"{100 * held / exact:.1f}", kl_text(found.calibrated(spec))
        cells = (size_text(held), share, key, value, kl_text(predicted), own)
        grid.add_row(spec, bits, *cells, kl.get(spec, "-"))

    for one in planned.measured:
        sides = (kl_text(sum(one.key.values())), kl_text(sum(one.value.values())))
        add(one.spec, f"{one.slot_bits:.2f}", planned.bytes_of(one.spec), *sides, one.predicted)
    if "recipe" in kl:
        add("recipe", "-", planned.recipe_bytes, "-", "-", planned.recipe_predicted)
    print_table(grid)


def paste_line(chosen: str | dict[str, Any], out: Path | None) -> str:
    """Return the line of Python that makes the cache."""
    from kvpact.recommend.files import RECIPE

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
