"""``kvpact snapshot``: caches as files: made from a text, shown, checked, and gone on from."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import typer

from kvpact.cli.console import (
    literal,
    note,
    output_console,
    printable,
    progress,
    size_text,
    table,
)
from kvpact.cli.generate import Stream, encode
from kvpact.cli.inputs import InputError, open_model, read_text, set_threads, text_config
from kvpact.errors import SnapshotError
from kvpact.evaluate import Candidate, compressed_cache
from kvpact.snapshot import Identity, Snapshot
from kvpact.spec import Spec

snapshot = typer.Typer(
    help="Save caches as files; show, verify and restore them.", no_args_is_help=True
)
_PATH = typer.Argument(..., metavar="FILE", help="A snapshot.", dir_okay=False)
_MODEL = typer.Option("smollm2", help="Name, hub id or folder of a model.")
_ADAPTER = typer.Option(None, help="Name of the model's adapter.", show_default=False)
_TENANT = typer.Option(None, help="Tenant that the snapshot belongs to.", show_default=False)
_THREADS = typer.Option(None, help="CPU threads.", show_default=False)
CHUNK = 256


@snapshot.command()
def save(
    out: Path = typer.Argument(..., metavar="FILE", help="File to write.", dir_okay=False),
    prompt: str | None = typer.Argument(None, help="Text to run through the model."),
    file: Path | None = typer.Option(
        None, help="UTF-8 text file (- for stdin), placed before the prompt.", show_default=False
    ),
    spec: str = typer.Option("turboquant:bits=4", help="Spec or recipe of the cache."),
    model: str = _MODEL,
    dtype: str = typer.Option("float32", help="float32, bfloat16 or float16."),
    chunk: int = typer.Option(CHUNK, min=1, help="Tokens per prefill chunk."),
    adapter: str | None = _ADAPTER,
    tenant: str | None = _TENANT,
    threads: int | None = _THREADS,
) -> None:
    """Run a text through a model and save the cache."""
    candidate = Candidate(spec)
    if not candidate.is_recipe:
        candidate.layers(1)  # a bad spec, or folder, is told before the model is loaded
    if not out.absolute().parent.is_dir():
        raise InputError(f"{out.absolute().parent} is no folder; make it first")
    parts = [read_text(file)] if file is not None else []
    parts += [prompt] if prompt else []
    if not parts:
        raise InputError("nothing to hold; give a prompt or --file")
    set_threads(threads)
    network, tokenizer = open_model(model, dtype)
    ids = encode(tokenizer, "\n\n".join(parts), chat=False)["input_ids"].to(network.device)
    length, limit = ids.shape[1], getattr(text_config(network), "max_position_embeddings", None)
    if length == 0 or (limit is not None and length > limit):
        raise InputError(f"{length} tokens do not fit the model's {limit} positions")
    cache = compressed_cache(network.config, candidate)
    with progress("prefill") as report, torch.no_grad():
        for start in range(0, length, chunk):
            network(ids[:, start : start + chunk], past_key_values=cache, logits_to_keep=1)
            report(min(start + chunk, length), length, "tokens")
    held = cache.snapshot(token_ids=ids, identity=_identity(network, adapter, tenant))
    held.save(out)
    exact = cache.stats()["values"] * 2
    grid = table(("snapshot", literal(out)))
    grid.add_row("tokens", str(held.tokens))
    grid.add_row("bytes", size_text(held.nbytes))
    grid.add_row("of an exact cache in fp16", f"{held.nbytes / exact:.3f}")
    output_console().print(grid)


@snapshot.command()
def show(
    path: Path = _PATH, as_json: bool = typer.Option(False, "--json", help="The manifest as JSON.")
) -> None:
    """Print what a snapshot holds; only its header is read."""
    held = Snapshot.open(path)
    m = held.manifest
    if as_json:
        typer.echo(json.dumps(held.to_json(), indent=2))
        return
    specs = list(dict.fromkeys(str(Spec.from_json(layer.spec)) for layer in m.layers))
    sizes = held.sizes()
    grid = table(("snapshot", literal(path)))
    for name, value in (
        ("specs", "; ".join(specs)),
        ("tokens", m.tokens),
        ("rows", m.batch),
        ("layers", len(m.layers)),
        ("KV heads", m.geometry.num_kv_heads),
        ("widths of K and V", f"{m.geometry.head_dim}, {m.geometry.value_dim}"),
        ("dtype", ", ".join(sorted({str(x.dtype)[6:] for x in m.layers if x.dtype}))),
        ("taken from layout", m.layout),
        ("pages", f"{m.pages} of {m.page_size} tokens, from token {m.begin}"),
        ("model", m.identity.model or "-"),
        ("adapter", m.identity.adapter or "-"),
        ("tenant", m.identity.tenant or "-"),
        ("hash of token ids", m.token_hash or "-"),
        ("digest", held.digest),
        *((f"bytes, {name}", size_text(count)) for name, count in sizes.items()),
        ("bytes in all", size_text(held.nbytes)),
    ):
        grid.add_row(name, literal(value))
    output_console().print(grid)


@snapshot.command()
def verify(paths: list[Path] = typer.Argument(..., metavar="FILE…", help="Snapshots.")) -> None:
    """Verify every checksum; exit with code 2 at the first damaged file."""
    for path in paths:
        held = Snapshot.open(path)
        with progress(f"checking {path}") as report:
            held.verify(lambda done, total: report(done, total, ""))
        typer.echo(f"{printable(path)}: good, {held.tokens} tokens, {size_text(held.nbytes)}")


@snapshot.command()
def restore(
    path: Path = _PATH,
    prompt: str | None = typer.Argument(None, help="Text that follows the snapshot's."),
    model: str = _MODEL,
    max_new_tokens: int = typer.Option(128, min=1, help="Tokens to generate at most."),
    adapter: str | None = _ADAPTER,
    tenant: str | None = _TENANT,
    threads: int | None = _THREADS,
) -> None:
    """Continue a snapshot by greedy decoding, with the model that it was made with."""
    held = Snapshot.load(path)
    ids = held.token_ids
    if ids is None or ids.shape[0] != 1:
        raise SnapshotError(f"{path} has no token ids, or several rows; restore it in Python")
    set_threads(threads)
    dtype = next(str(layer.dtype)[6:] for layer in held.manifest.layers if layer.dtype)
    network, tokenizer = open_model(model, dtype)
    held.require(**_identity(network, adapter, tenant).to_json())
    cache = compressed_cache(network.config, Candidate(_recipe(held)))
    cache.restore(held, device=network.device)
    if prompt:
        more = tokenizer(prompt, return_tensors="pt", add_special_tokens=False)["input_ids"]
        ids = torch.cat([ids, more.to(ids.dtype)], dim=1)
    else:
        cache.crop(-1)  # the last token is computed again: a snapshot holds no logits
    limit = getattr(text_config(network), "max_position_embeddings", None)
    if limit is not None and ids.shape[1] + max_new_tokens > limit:
        raise InputError(f"{ids.shape[1]} and {max_new_tokens} tokens, the model has {limit}")
    note(f"{held.tokens} tokens restored")
    network.generate(
        ids.to(network.device),
        attention_mask=torch.ones_like(ids).to(network.device),
        do_sample=False,
        temperature=None,
        top_p=None,
        top_k=None,
        past_key_values=cache,
        max_new_tokens=max_new_tokens,
        streamer=Stream(tokenizer),
    )


def _identity(model: Any, adapter: str | None, tenant: str | None) -> Identity:
    from kvpact.integrations.fingerprint import model_fingerprint

    return Identity(model=model_fingerprint(model, adapter=adapter), adapter=adapter, tenant=tenant)


def _recipe(held: Snapshot) -> Any:
    """Return the snapshot's specs as a recipe."""
    specs = [Spec.from_json(layer.spec) for layer in held.manifest.layers]
    return {"default": specs[0], "layers": dict(enumerate(specs))}
