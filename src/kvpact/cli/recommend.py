"""``kvpact recommend``: the spec or recipe that suits a model and a budget."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from kvpact.cli import inputs, options
from kvpact.cli.console import explain, note, print_document, progress, say, show_files, size_text
from kvpact.errors import BackendUnavailable

if TYPE_CHECKING:
    from kvpact.recommend import Recommendation

TOKENS, QUICK_TOKENS = 2048, 768


def recommend_command(
    model: str = options.MODEL_ARGUMENT,
    text: Path | None = options.optional(
        "UTF-8 text file; the shipped excerpt of a book if omitted."
    ),
    context: int = typer.Option(32_768, min=1, help="Context length for which bytes are counted."),
    budget: str = typer.Option(
        "30%",
        help="Bytes that the cache may take: a share of the 16-bit cache (30%), a size (4GB), or a "
        "spec, for as many bytes as it takes.",
        autocompletion=options.complete_spec,
    ),
    quick: bool = typer.Option(False, "--quick", help=f"Use {QUICK_TOKENS} tokens of text."),
    tokens: int | None = options.optional(f"Tokens of text to use; {TOKENS} if omitted."),
    out: Path = typer.Option(
        Path("recommended"), *options.OUT, help="Folder for recipe.toml, recommend.json and a plot."
    ),
    force: bool = options.FORCE,
    verbose: bool = options.VERBOSE,
    dtype: str = options.DTYPE,
    threads: int | None = options.THREADS,
    as_json: bool = options.JSON,
) -> None:
    """Recommend a spec, or a recipe by layer: gradients predict KL, one evaluation verifies.

    Bytes are counted for one sequence of --context tokens.
    """
    from kvpact.evaluate.feed import check_sizes
    from kvpact.recommend import recommend, write_recommendation
    from kvpact.recommend.budget import check_budget
    from kvpact.recommend.files import LADDER, RECIPE, recommendation_data

    ((text_name, content),) = inputs.texts_of([] if text is None else [text])
    if tokens is None:
        tokens = QUICK_TOKENS if quick else TOKENS
    check_sizes(tokens, 256)
    check_budget(model, budget, context)  # before weights are loaded
    with inputs.results_folder(out, force, RECIPE, LADDER, "recommend.*", plots=False):
        inputs.check_models([model])
        network, tokenizer = inputs.open_model(model, dtype, threads)
        given: dict[str, Any] = {"budget": budget, "context": context, "tokens": tokens}
        given |= {"model_name": model, "text_name": text_name}
        with progress("measuring") as report:
            found = recommend(network, content, tokenizer=tokenizer, progress=report, **given)
        inputs.note_if_short(found.plan.tokens, tokens)
        try:
            files = write_recommendation(found, out)
        except BackendUnavailable as error:  # the plot is written last
            note(f"no plot: {error}")
            files = [out / name for name in (RECIPE, "recommend.json", LADDER)]
    if as_json:
        data = recommendation_data(found)
        print_document("recommend", **data, files=[str(path) for path in files])
        return
    say(found.answer)
    say(found.line(out / RECIPE))
    show_files(files)
    say(f"\n{found.table}")
    if verbose:
        _explain(found)


def _explain(found: Recommendation) -> None:
    """Print the way of measuring, and remarkable results."""
    from kvpact.evaluate.text import VERDICTS

    planned, sizes = found.plan, found.plan.sizes
    stay = "; layers with a bounded window stay exact, " + size_text(sizes.native)
    explain(
        f"\n{len(planned.layers)} of {planned.num_layers} layers are compressed, which hold "
        f"{size_text(sizes.covered)} of the exact cache's {size_text(sizes.exact)} at "
        f"{sizes.context} tokens (16 bits a number){stay if sizes.native else ''}. KL: mean over "
        f"{planned.tokens} tokens, in nats; calibrated: by what was measured of others. "
        f"Budget: {size_text(planned.budget)}."
    )
    limits = ", ".join(f"{name} up to {most:g}" for name, most in VERDICTS)
    for line in (*(f"left out: {x}" for x in planned.left_out), *planned.notes, f"KL: {limits}"):
        say(line)
    if (pair := found.against_uniform) is not None:
        expected = planned.recipe_predicted - planned.of(pair.against).predicted
        measured = f"{pair.kl_difference:+.5f} ± {pair.kl_difference_se:.5f}"
        say(f"recipe less {pair.against}: {measured} measured, {expected:+.5f} predicted")
