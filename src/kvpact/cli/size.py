"""``kvpact size``: the bytes of a cache for a geometry; no model is loaded."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import typer

from kvpact.cache import planned_bytes, unplanned
from kvpact.cli.console import output_console, size_text, table
from kvpact.cli.inputs import InputError, dtype_of, read_text
from kvpact.geometry import CacheGeometry
from kvpact.recipe import layer_specs


def size(
    specs: list[str] = typer.Argument(..., metavar="SPEC...", help="Specs or recipes."),
    tokens: int = typer.Option(..., help="Tokens per sequence.", show_default=False),
    config: Path | None = typer.Option(
        None, help="A model's config.json, in place of the next four options.", show_default=False
    ),
    layers: int | None = typer.Option(None, help="Layers with full attention."),
    kv_heads: int | None = typer.Option(None, help="KV heads per layer."),
    head_dim: int | None = typer.Option(None, help="Width of a key."),
    v_head_dim: int | None = typer.Option(None, help="Width of a value, if it differs."),
    batch: int = typer.Option(1, help="Number of sequences."),
    dtype: str = typer.Option("float16", help="Dtype of sinks, window and uncompressed caches."),
) -> None:
    """Print the bytes that caches take for a geometry; no model is loaded."""
    if tokens < 0 or batch < 1:
        raise InputError("--tokens should be 0 or more, --batch 1 or more")
    shape = _shape(config) if config is not None else {}
    given = {"layers": layers, "kv_heads": kv_heads, "head_dim": head_dim, "v_head_dim": v_head_dim}
    shape |= {name: value for name, value in given.items() if value is not None}
    missing = [name for name in ("layers", "kv_heads", "head_dim") if name not in shape]
    if missing:
        options = " ".join(f"--{name.replace('_', '-')} N" for name in missing)
        raise InputError(f"the geometry is incomplete; add {options}, or give --config")
    geometry = CacheGeometry(
        num_layers=shape["layers"],
        num_kv_heads=shape["kv_heads"],
        head_dim=shape["head_dim"],
        v_head_dim=shape.get("v_head_dim"),
        dtype=dtype_of(dtype),
    )
    values = (batch * tokens * geometry.num_layers * geometry.num_kv_heads) * (
        geometry.head_dim + geometry.value_dim
    )
    columns = "spec|slots|factors|sinks+window|unused|total|bits/value|of fp16"
    grid = table(columns.split("|"))
    for text in specs:
        held = planned(text, geometry, tokens, batch)
        grid.add_row(
            Path(text).name if text.endswith((".toml", ".json")) else text,
            size_text(held["slots"]),
            size_text(held["factors"]),
            size_text(held["sinks"] + held["window"]),
            size_text(held["unused"]),
            size_text(held["total"]),
            f"{held['total'] * 8 / values:.3f}" if values else "-",
            f"{100 * held['total'] / (2 * values):.1f} %" if values else "-",
        )
    console = output_console()
    console.print(grid)
    console.print(
        f"{geometry.num_layers} layers, {geometry.num_kv_heads} KV heads, widths "
        f"{geometry.head_dim} and {geometry.value_dim}, {batch} x {tokens} tokens, exact parts in "
        f"{dtype}; fp16: {size_text(2 * values)}",
        style="dim",
        highlight=False,
    )
    notes = {
        note
        for text in specs
        for layer in layer_specs(text, geometry.num_layers)
        for note in unplanned(layer, geometry)
    }
    for note in sorted(notes):
        console.print(f"Not known beforehand: {note}.", style="dim", highlight=False)


def planned(spec: str, geometry: CacheGeometry, tokens: int, batch: int) -> dict[str, int]:
    """Return the bytes of a cache by part, summed over the layers of a spec or recipe."""
    one, total = replace(geometry, num_layers=1), Counter[str]()
    for layer in layer_specs(spec, geometry.num_layers):
        total.update(planned_bytes(layer, one, tokens, batch))
    return total


def _shape(path: Path) -> dict[str, Any]:
    """Return the geometry in a model's config.json.

    Raises
    ------
    InputError
        No JSON, no model config, or one whose cache has no uniform K and V.
    """
    try:
        data = json.loads(read_text(path))
        data = {**data, **data.get("text_config", {})}
        heads = data["num_attention_heads"]
        kinds = data.get("layer_types") or ["full_attention"] * data["num_hidden_layers"]
        if "kv_lora_rank" in data:
            raise InputError(
                f"{path}: this model caches a latent (MLA); give --layers {len(kinds)} "
                f"--kv-heads 1 --head-dim {data['kv_lora_rank']} "
                f"--v-head-dim {data.get('qk_rope_head_dim', 64)} instead"
            )
        width = data.get("head_dim") or data["hidden_size"] // heads
        shape = {
            "layers": kinds.count("full_attention"),
            "kv_heads": data.get("num_key_value_heads") or heads,
            "head_dim": width,
        }
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(f"{path} is no model's config.json: {error!r}") from error
    return shape
