"""``kvpact calibrate``: what methods learn of a model from texts, as one file."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from kvpact.cli import options
from kvpact.cli.console import note, print_document, print_pairs, progress, size_text
from kvpact.cli.inputs import InputError, check_models, check_output, open_model, texts_of
from kvpact.spec import DEFAULT_SPEC, parse_spec

if TYPE_CHECKING:
    import torch

SPECS = ["pca", DEFAULT_SPEC]
ROW = 2048


def calibrate_command(
    model: str = options.MODEL_ARGUMENT,
    out: Path = typer.Option(
        Path("calibration.safetensors"),
        dir_okay=False,
        help="File to write; an earlier calibration is replaced, nothing else is.",
    ),
    force: bool = options.FORCE,
    text: list[Path] = options.TEXTS,
    spec: list[str] = typer.Option(
        SPECS,
        help="Spec to calibrate; `pca` and `trellis` learn the same at all bits. Several may be "
        "given.",
        autocompletion=options.complete_spec,
    ),
    tokens: int = typer.Option(4096, min=256, help="Tokens of all texts together."),
    dtype: str = options.DTYPE,
    threads: int | None = options.THREADS,
    as_json: bool = options.JSON,
) -> None:
    """Calibrate methods to a model, for prefixes, pages and pca.

    Use texts of the kinds that the model will read; about 4,000 tokens are enough.
    """
    from kvpact.calibration import Calibration

    specs = [parse_spec(one) for one in dict.fromkeys(spec)]
    check_output(out, "calibration", Calibration.load, force)
    given = texts_of(text)
    check_models([model])
    network, tokenizer = open_model(model, dtype, threads)
    rows = rows_of(tokenizer, given, tokens)
    held = sum(map(len, rows))
    if held < tokens:
        note(f"the texts give {held} tokens, fewer than the {tokens} asked for")
    from kvpact.integrations.transformers import calibrate

    with progress("calibrating") as report:
        found = calibrate(network, rows, specs, progress=report)
    found.save(out)
    layer, size = next(iter(found.layers.values())), out.stat().st_size
    if as_json:
        counts = {"layers": len(found.layers), "tokens": found.tokens}
        learnt = {"k": list(layer.k), "v": list(layer.v)}
        print_document("calibrate", file=str(out), bytes=size, **counts, **learnt)
        return
    rows_shown = (
        ("layers", len(found.layers)),
        ("tokens", found.tokens),
        ("learnt of K", ", ".join(layer.k) or "-"),
        ("learnt of V", ", ".join(layer.v) or "-"),
        ("bytes", size_text(size)),
    )
    print_pairs(("calibration", out), rows_shown)


def rows_of(tokenizer: Any, texts: list[tuple[str, str]], tokens: int) -> list[torch.Tensor]:
    """Return equal pieces of texts, as much of each: at most `tokens` tokens in all.

    What the tokenizer puts in front of texts is in front of each piece, too: what is learnt of the
    first key is of that token, which may draw much of the attention.
    """
    import torch

    from kvpact.evaluate.feed import first_tokens
    from kvpact.integrations.transformers.attention.calibrate import LEAST_TOKENS

    share = tokens // len(texts)
    ids = [first_tokens(tokenizer, content, share) for _, content in texts]
    short = min(zip(ids, texts, strict=True), key=lambda pair: len(pair[0]))
    if len(short[0]) < LEAST_TOKENS:
        raise InputError(
            f"{short[1][0]} gives {len(short[0])} tokens of --tokens {tokens} for {len(texts)} "
            f"texts; every text has to give {LEAST_TOKENS} or more"
        )
    length = min(len(one) // -(-len(one) // ROW) for one in ids)
    rows, empty = [], tokenizer("")["input_ids"]
    for one in ids:
        same = [int(x) == y for x, y in zip(one, empty, strict=False)]
        front = one[: [*same, False].index(False)]  # after it there may be a token of the end
        size = length - len(front)
        parts = torch.split(one[len(front) :], size)
        rows += [torch.cat([front, part]) for part in parts if len(part) == size]
    return rows
