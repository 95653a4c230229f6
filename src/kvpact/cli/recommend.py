"""``kvpact recommend``: which spec or recipe suits a model and a budget."""

from __future__ import annotations

from pathlib import Path

import typer

from kvpact.cli import options
from kvpact.cli.complete import complete_spec
from kvpact.cli.console import note, progress
from kvpact.cli.document import print_document
from kvpact.cli.inputs import InputError, require, results_folder, texts_of

CHUNK = 256
TOKENS, QUICK_TOKENS = 2048, 768


def recommend_command(
    model: str = options.MODEL_ARGUMENT,
    text: Path | None = typer.Option(
        None, help="UTF-8 text file; the shipped excerpt of a book if omitted.", show_default=False
    ),
    context: int = typer.Option(32_768, help="Context length for which bytes are counted."),
    budget: str = typer.Option(
        "30%",
        help="Bytes that the cache may take: a share of the 16-bit cache (30%), a size (4GB), or a "
        "spec, for as many bytes as it takes.",
        autocompletion=complete_spec,
    ),
    quick: bool = typer.Option(False, "--quick", help=f"Use {QUICK_TOKENS} tokens of text."),
    tokens: int | None = typer.Option(
        None, help=f"Tokens of text to use; {TOKENS} if omitted.", show_default=False
    ),
    out: Path | None = typer.Option(
        None, help="Folder for recipe.toml, recommend.json and a plot.", show_default=False
    ),
    dtype: str = options.DTYPE,
    threads: int | None = options.THREADS,
    as_json: bool = options.JSON,
) -> None:
    """Recommend a spec, or a recipe by layer: gradients predict KL, one evaluation verifies.

    Bytes are counted for one sequence of --context tokens.
    """
    from kvpact.cli.eval_tables import show_files
    from kvpact.cli.network import check_models, open_model
    from kvpact.cli.recommend_tables import show
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
        if len(ids) < tokens:
            note(f"the text has {len(ids)} tokens, fewer than the {tokens} asked for")
        with progress("predicting") as report:
            found = survey(network, ids, chunk=CHUNK, progress=report)
        planned = plan(found, context=context, budget=budget)
        with progress("verifying") as report:
            verified = verify(
                network,
                ids,
                planned,
                chunk=CHUNK,
                progress=report,
                model_name=model,
                text_name=text_name,
            )
        files = [] if out is None else write_recommendation(verified, out)
    if as_json:
        data = recommendation_data(verified)
        print_document("recommend", **data, files=[str(path) for path in files])
        return
    show(verified, out)
    show_files(files)
