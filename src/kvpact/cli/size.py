"""``kvpact size``: the bytes of caches for a model or a geometry; no weights are loaded."""

from __future__ import annotations

import re
from pathlib import Path

import typer

from kvpact.cli import options
from kvpact.cli.complete import complete_dtype, complete_size
from kvpact.cli.document import print_document
from kvpact.cli.inputs import InputError
from kvpact.errors import SpecError
from kvpact.spec import parse_spec

TOKENS = ["4k", "32k", "128k"]


def size(
    words: list[str] = typer.Argument(
        [],
        metavar="MODEL SPEC",
        help="A config.json, the folder of a model, smollm2, gemma3 or a hub id; then specs or "
        "recipes, a common selection if omitted. With --layers give no MODEL.",
        show_default=False,
        autocompletion=complete_size,
    ),
    tokens: list[str] = typer.Option(
        TOKENS, help="Tokens per sequence; 32k means 32,768. Several may be given."
    ),
    batch: int = typer.Option(1, help="Number of sequences."),
    layers: int | None = typer.Option(None, help="Layers with full attention."),
    kv_heads: int | None = typer.Option(None, help="KV heads per layer."),
    head_dim: int | None = typer.Option(None, help="Width of a key."),
    v_head_dim: int | None = typer.Option(None, help="Width of a value, if it differs."),
    dtype: str | None = typer.Option(
        None,
        help="Dtype of sinks, window and uncompressed caches; the model's if omitted, or float16 "
        "where that is wider.",
        show_default=False,
        autocompletion=complete_dtype,
    ),
    as_json: bool = options.JSON,
) -> None:
    """Print the bytes that caches of a model take; no weights are loaded.

    One --tokens shows where the bytes go, several show how they grow. The bytes are those that
    memory_usage() of such a cache reports, and those of the model's other layers.
    """
    from kvpact.geometry import MAX_SIZE  # here, so that --help does not wait for torch

    lengths = [length_of(text) for text in dict.fromkeys(tokens)]
    if not 1 <= batch <= MAX_SIZE:
        raise InputError(f"--batch {batch} is not possible; take a number from 1 to {MAX_SIZE}")
    numbers = {"layers": layers, "kv_heads": kv_heads, "head_dim": head_dim}
    missing = [name for name, number in numbers.items() if number is None]
    by_number = v_head_dim is not None or len(missing) < len(numbers)
    if by_number and missing:
        more = " ".join(f"--{name.replace('_', '-')} N" for name in missing)
        raise InputError(f"the geometry is incomplete; add {more}, or give a MODEL instead")
    model, specs = (None, words) if by_number else (_model(words), words[1:])

    from kvpact.cli.size_plan import layers_of_model, layers_of_numbers, not_planned, planned
    from kvpact.cli.size_tables import show

    if model is not None:
        held = layers_of_model(model, dtype)
    else:
        held = layers_of_numbers(numbers, v_head_dim, dtype or "float16")
    specs = list(dict.fromkeys(specs)) or list(options.SPECS)
    told = {
        "model": model,
        "positions": held.positions,
        "dtype": str(held.dtype).removeprefix("torch."),
        "batch": batch,
        "layers": held.counted(),
        "rows": [
            {"spec": spec, "tokens": length, **planned(spec, held, length, batch)}
            for spec in specs
            for length in lengths
        ],
        "unplanned": sorted({x for spec in specs for x in not_planned(spec, held)}),
    }
    if as_json:
        print_document("size", **told)
    else:
        show(told)


def length_of(text: str) -> int:
    """Return the tokens that a number such as 4096 or 32k means.

    Raises
    ------
    InputError
        It is no such number.
    """
    found = re.fullmatch(r"([0-9]{1,15})(k?)", text.strip().lower())
    if found is None or not int(found[1]):
        raise InputError(f"--tokens {text} is no number of tokens; take one such as 4096 or 32k")
    return int(found[1]) * (1024 if found[2] else 1)


def _model(words: list[str]) -> str:
    """Return the model among the words of the command."""
    choice = "give a MODEL first, or --layers N --kv-heads N --head-dim N"
    if not words:
        raise InputError(f"no model is named; {choice}")
    if not Path(words[0]).expanduser().exists() and _is_spec(words[0]):
        raise InputError(f"{words[0]!r} is a spec and no model; {choice}")
    return words[0]


def _is_spec(text: str) -> bool:
    try:
        parse_spec(text)
    except SpecError:
        return text.endswith((".toml", ".json"))
    return True
