"""``kvpact size``: the bytes of caches for a model or a geometry; no weights are loaded."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from rich.text import Text

from kvpact.cli import options
from kvpact.cli.console import output_console, print_document, print_table, printable, size_text
from kvpact.cli.inputs import InputError
from kvpact.data import model_table
from kvpact.errors import GeometryError
from kvpact.geometry import MAX_SIZE, CacheGeometry
from kvpact.integrations import sizes

_BAR = 48  # cells of the longest bar at most
_LABEL = 34  # of a spec at most
_SIZE = len("999.99 MB")
_STYLES = {"packed": ("█", "#", "green"), "exact": ("▓", "=", "magenta"), "own": ("░", ".", "")}


def size(
    words: list[str] = typer.Argument(
        [],
        metavar="MODEL SPEC",
        help="One of some 45 models by name, such as qwen3-8b, or a config.json, a model's folder "
        "or a hub id; then specs or recipes, a common selection if omitted. With --layers give no "
        "MODEL.",
        show_default=False,
        autocompletion=options.complete_size,
    ),
    tokens: list[str] = typer.Option(
        list(sizes.TOKENS), help="Tokens per sequence; 32k means 32,768. Several may be given."
    ),
    batch: int = typer.Option(1, help="Number of sequences."),
    layers: int | None = typer.Option(None, help="Layers with full attention."),
    kv_heads: int | None = typer.Option(None, help="KV heads per layer."),
    head_dim: int | None = typer.Option(None, help="Width of a key."),
    v_head_dim: int | None = typer.Option(None, help="Width of a value, if it differs."),
    dtype: str | None = options.optional(
        "Dtype of sinks, window and uncompressed caches; the model's if omitted, or float16 where "
        "that is wider.",
        autocompletion=options.complete_dtype,
    ),
    k_eq_v: bool = typer.Option(
        False, "--k-eq-v", help="Values alone where keys are made of them (Gemma 4's full layers)."
    ),
    sliding: str | None = options.SLIDING,
    budget: str | None = options.optional(
        metavar="BYTES",
        help="Show how a cache with this budget (200MB, or 25% of the 16-bit cache of the most "
        "--tokens) loses bits as it grows; SPEC is what it begins with, exact if omitted.",
    ),
    listed: bool = typer.Option(False, "--list", help="List the models that are known by name."),
    as_json: bool = options.JSON,
) -> None:
    """Print the bytes that caches of a model take; no weights are loaded.

    One --tokens shows where the bytes go, several show how they grow. The bytes are those that
    memory_usage() of such a cache reports, and those of the model's other layers.
    """
    if listed:
        found = [{"name": name, "hub": x["hub"]} for name, x in model_table()["models"].items()]
        if as_json:
            print_document("size", models=found)
        else:
            print_table(("model", "id on the hub"), map(dict.values, found), left=2)
        return
    if not 1 <= batch <= MAX_SIZE:
        raise InputError(f"--batch {batch} is not possible; take a number from 1 to {MAX_SIZE}")
    try:
        lengths = [sizes.length_of(text) for text in tokens]
    except GeometryError as error:
        raise InputError(f"--tokens {error}") from error
    numbers = {"--layers N": layers, "--kv-heads N": kv_heads, "--head-dim N": head_dim}
    missing = [name for name, number in numbers.items() if number is None]
    by_number = v_head_dim is not None or len(missing) < len(numbers)
    if by_number and missing:
        raise InputError(
            f"the geometry is incomplete; add {' '.join(missing)}, or give a MODEL instead"
        )
    if not by_number and not words:
        raise InputError(f"no model is named; give a MODEL first, or {' '.join(numbers)}")
    shape = (
        CacheGeometry(layers or 0, kv_heads or 0, head_dim or 0, v_head_dim) if by_number else None
    )
    named = list(dict.fromkeys(words if shape else words[1:]))
    if others := [x for x in words[1:] if x in model_table()["models"]]:
        raise InputError(f"{others[0]!r} is a model and no spec; write: kvpact size {others[0]}")
    specs = named or sizes.SPECS
    schedule = None
    if budget is not None:
        if k_eq_v or sliding:
            raise InputError("--budget can't go with --k-eq-v and --sliding")
        from kvpact.cli.size_budget import schedule_data, schedule_of, show_schedule

        if len(named) > 1:
            raise InputError("--budget takes one SPEC to begin with, or a recipe; give one at most")
        specs = named or ["none"]
        given = {"context": max(lengths), "batch": batch, "dtype": dtype}
        schedule = schedule_data(schedule_of(shape or words[0], budget, specs[0], **given))  # type: ignore[arg-type]
    more = {"batch": batch, "dtype": dtype, "k_eq_v": k_eq_v, "sliding": sliding}
    data = asdict(sizes.size(shape or words[0], specs, lengths, **more))  # type: ignore[arg-type]
    if as_json:
        print_document("size", **data, schedule=schedule)
    elif schedule is not None:
        show_schedule(schedule)
    else:
        show(data)


def show(data: dict[str, Any]) -> None:
    """Print the document of ``--json`` as a table and bars."""
    console = output_console()
    rows = data["rows"]
    lengths = list(dict.fromkeys(row["tokens"] for row in rows))
    if len(lengths) == 1:
        _show_parts(rows)
    else:
        _show_growth(rows, lengths)
    if max(lengths) > 0:
        _show_bars(console, [row for row in rows if row["tokens"] == max(lengths)], data["batch"])
    for line in _about(data, max(lengths)):
        console.print(line, style="dim", highlight=False, markup=False)


def name_of(spec: str) -> str:
    """Return a spec, or the file name of a recipe."""
    return printable(Path(spec).name if spec.endswith((".toml", ".json")) else spec)


def tokens_text(tokens: int) -> str:
    """Return a number of tokens as people say it."""
    whole = tokens >= 1024 and tokens % 1024 == 0
    return f"{tokens // 1024}k" if whole else f"{tokens:,}"


def _parts(row: dict[str, Any]) -> dict[str, int]:
    """Return the bytes of packed slots and all that they need, of exact tokens, and the rest."""
    exact, own = row["sinks"] + row["window"], row["own"]
    return {"packed": row["total"] - exact - own, "exact": exact, "own": own}


def _show_parts(rows: list[dict[str, Any]]) -> None:
    """Print a row for each spec, without the parts that are empty in all of them."""
    titles = {"packed": "packed", "exact": "sinks,\nwindow", "own": "other\nlayers"}
    held = [name for name in titles if any(_parts(row)[name] for row in rows)]
    columns = (*(titles[name] for name in held), "total", "bits/\nvalue", "of 16\nbits")
    lines = []
    for row in rows:
        sizes = (size_text(_parts(row)[name]) for name in held)
        lines.append((name_of(row["spec"]), *sizes, size_text(row["total"]), *_shares(row)))
    print_table(("spec", *columns), lines, spare=("bits/\nvalue", "sinks,\nwindow"))


def _show_growth(rows: list[dict[str, Any]], lengths: list[int]) -> None:
    columns = [f"{tokens_text(n)}\ntokens" for n in lengths]
    lines = []
    for spec in dict.fromkeys(row["spec"] for row in rows):
        of = {row["tokens"]: row for row in rows if row["spec"] == spec}
        sizes = (size_text(of[n]["total"]) for n in lengths)
        lines.append((name_of(spec), *sizes, *_shares(of[max(lengths)])))
    spare = ("bits/\nvalue", *columns[:-1])
    print_table(("spec", *columns, "bits/\nvalue", "of 16\nbits"), lines, spare=spare)


def _shares(row: dict[str, Any]) -> tuple[str, str]:
    if row["bits_per_value"] is None:
        return "-", "-"
    return f"{row['bits_per_value']:.3f}", f"{100 * row['total'] / row['exact']:.1f} %"


def _show_bars(console: Console, rows: list[dict[str, Any]], batch: int) -> None:
    label = min(max(len(name_of(row["spec"])) for row in rows), _LABEL)
    width = max(min(_BAR, console.width - label - _SIZE - 4), 8)
    most = max(max(row["total"], row["exact"]) for row in rows)
    plain = not console.encoding.lower().startswith("utf")
    seen = {}
    for row in rows:
        line = Text(f" {name_of(row['spec'])[:label]:<{label}} ")
        end = cells = 0
        for name, count in _parts(row).items():
            end += count
            drawn = round(width * end / most) - cells
            cells += drawn
            block, ascii_block, style = _STYLES[name]
            line.append((ascii_block if plain else block) * drawn, style)
            if drawn:
                seen[name] = ascii_block if plain else block
        line.append(f" {size_text(row['total'])}")
        console.print(line, no_wrap=True, crop=False, overflow="ignore")
    names = {"packed": "packed", "exact": "exact tokens", "own": "other layers"}
    legend = ", ".join(f"{block} {names[name]}" for name, block in seen.items())
    legend = f": {legend}" if len(seen) > 1 else ""
    tokens = tokens_text(rows[0]["tokens"])
    sequences = f"{batch} sequences of " if batch > 1 else ""
    title = f" {sequences}{tokens} tokens, a whole bar is {size_text(most)}{legend}"
    console.print(title, style="dim", highlight=False, markup=False)
    console.print()


def _about(data: dict[str, Any], longest: int) -> list[str]:
    """Return the counted layers and tokens, in words."""
    lines = [f"{layer['count']} x {_layer_text(layer)}" for layer in data["layers"]]
    exact = next(row["exact"] for row in data["rows"] if row["tokens"] == longest)
    sequences = f"{data['batch']} x {longest:,} tokens"
    lines.append(
        f"{sequences} with K and V in 16 bits: {size_text(exact)}; exact parts in {data['dtype']}."
    )
    if len({row["tokens"] for row in data["rows"]}) > 1:
        lines.append("The last two columns are of the longest sequences.")
    if data["positions"] is not None and longest > data["positions"]:
        lines.append(f"The model is made for {data['positions']:,} tokens.")
    lines += [f"Not known beforehand: {printable(text)}." for text in data["unplanned"]]
    return lines


def _layer_text(layer: dict[str, Any]) -> str:
    kind = layer["kind"].replace("_", " ")
    parts = []
    if layer["latent"]:
        parts.append(f"latents of {layer['key_dim']} and {layer['value_dim']}")
        if layer["rate"] > 1:
            parts = [f"an entry of {layer['key_dim']} numbers for {layer['rate']} tokens"]
    elif layer["heads"]:
        widths = f"{layer['key_dim']} and {layer['value_dim']}"
        parts.append(f"{layer['heads']} KV heads, widths {widths}")
    if layer["limit"] is not None:
        parts.append(f"{layer['limit']:,} tokens at most")
    if layer["index_width"]:
        each = "a token" if layer["rate"] == 1 else "an entry"
        parts.append(f"{layer['index_width']} numbers {each} of an index")
    if layer["state_bytes"]:
        parts.append(f"states of {size_text(layer['state_bytes'])}")
    held = ", ".join(parts) or ("images" if kind == "cross attention" else "holds nothing")
    packed = f"; packed by {layer['sliding']}" if layer["sliding"] else "; not compressed"
    return f"{kind}: {held}{'' if layer['compressed'] else packed}"
