"""``kvpact snapshot``: caches as files, made from a text, shown, verified and continued."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from kvpact.cli import inputs, options
from kvpact.cli.console import note, print_document, print_pairs, printable, progress, size_text
from kvpact.cli.generate import TextStream
from kvpact.errors import KVPactError, SnapshotError
from kvpact.spec import Spec

if TYPE_CHECKING:
    from kvpact.snapshot import Identity

_PATH = typer.Argument(..., metavar="FILE", help="Snapshot file.", dir_okay=False)
_ADAPTER = options.optional("Name of the model's adapter.")
_TENANT = options.optional("Name of the tenant that the snapshot belongs to.")
CHUNK = 256


def save(
    prompt: str | None = typer.Argument(None, help="Text to run through the model."),
    file: Path | None = options.FILE,
    out: Path = typer.Option(
        Path("snapshot.safetensors"),
        *options.OUT,
        dir_okay=False,
        help="File to write; an earlier snapshot is replaced, nothing else is.",
    ),
    force: bool = options.FORCE,
    prompt_tokens: int | None = options.PROMPT_TOKENS,
    spec: str | None = options.SPEC,
    sliding: str | None = options.SLIDING,
    budget: str | None = options.BUDGET,
    model: str = options.MODEL,
    storage: str | None = options.STORAGE_SPEC,
    calibration: Path | None = options.CALIBRATION,
    dtype: str = options.DTYPE,
    chunk: int | None = options.optional(
        min=1, help=f"Tokens per prefill chunk; {CHUNK} if omitted, all with --budget."
    ),
    adapter: str | None = _ADAPTER,
    tenant: str | None = _TENANT,
    threads: int | None = options.THREADS,
    as_json: bool = options.JSON,
) -> None:
    """Run a text through a model and save the cache."""
    import torch

    from kvpact.cache import recode
    from kvpact.integrations.transformers.layers.rings import PACKED_RING
    from kvpact.integrations.transformers.versions import named
    from kvpact.snapshot import Snapshot

    candidate = inputs.candidate_of(spec, sliding, budget)
    inputs.check_output(out, "snapshot", Snapshot.open, force)
    text = inputs.prompt_text(file, prompt, "hold")
    given = inputs.prompted(
        candidate, text, (model, dtype, threads), calibration, most=prompt_tokens
    )
    network, _, ids, cache, known = given
    ids, length = ids.to(network.device), ids.shape[1]
    chunk = chunk or (CHUNK if budget is None else length)
    if cache.stands:  # the last token is left to the restore, which could not take it back
        length = max(length - 1, 1)
    with progress("prefill") as report, torch.no_grad():
        for start in range(0, length, chunk):
            network(ids[:, start : min(start + chunk, length)], logits_to_keep=1, **named(cache))
            report(min(start + chunk, length), length, "tokens")
    held = cache.snapshot(token_ids=ids, identity=_identity(network, adapter, tenant))
    if storage is not None:
        held = recode(held, storage, calibration=known, device=network.device)
    held.save(out)
    # What is packed of windows is among the values.
    others = (x for x in held.manifest.records if x.name != PACKED_RING)
    numbers = sum(record.tensor.numel() for record in others)
    exact = (cache.stats()["values"] + numbers) * 2
    if as_json:
        sizes = {"tokens": held.tokens, "bytes": held.nbytes, "exact_bytes_fp16": exact}
        print_document("snapshot save", file=str(out), **sizes)
        return
    share = ("of an exact cache in fp16", f"{held.nbytes / exact:.3f}")
    rows = (("tokens", held.tokens), ("bytes", size_text(held.nbytes)), share)
    print_pairs(("snapshot", out), rows)


def show(path: Path = _PATH, as_json: bool = options.JSON) -> None:
    """Print what a snapshot holds; only its header is read."""
    from kvpact.snapshot import Snapshot

    held = Snapshot.open(path)
    m = held.manifest
    if as_json:
        print_document("snapshot show", **held.to_json())
        return
    specs = list(dict.fromkeys(str(Spec.from_json(layer.spec)) for layer in m.layers))
    sizes = held.sizes()
    rows = (
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
    )
    print_pairs(("snapshot", path), rows)


def verify(
    paths: list[Path] = typer.Argument(..., metavar="FILE…", help="Snapshot files."),
    as_json: bool = options.JSON,
) -> None:
    """Verify every checksum; exit with code 2 at the first damaged file."""
    from kvpact.snapshot import Snapshot

    good = []
    for path in paths:
        try:
            held = Snapshot.open(path)
            with progress(f"checking {path}") as report:
                held.verify(lambda done, total: report(done, total, ""))
        except KVPactError as error:  # which of several files it was
            text = str(error)
            raise type(error)(text if str(path) in text else f"{path}: {text}") from error
        good.append({"file": str(path), "tokens": held.tokens, "bytes": held.nbytes})
        if not as_json:
            tokens = f"{held.tokens} token" + "s" * (held.tokens != 1)
            typer.echo(f"{printable(path)}: good, {tokens}, {size_text(held.nbytes)}")
    if as_json:
        print_document("snapshot verify", good=good)


def restore(
    path: Path = _PATH,
    prompt: str | None = typer.Argument(None, help="Text to append to that of the snapshot."),
    spec: str | None = options.optional(
        "Spec to continue with; the file's own if omitted.", autocompletion=options.complete_spec
    ),
    budget: str | None = options.BUDGET,
    calibration: Path | None = options.CALIBRATION,
    model: str = options.MODEL,
    max_new_tokens: int = options.NEW_TOKENS,
    adapter: str | None = _ADAPTER,
    tenant: str | None = _TENANT,
    threads: int | None = options.THREADS,
    as_json: bool = options.JSON,
) -> None:
    """Continue a snapshot by greedy decoding, with the model that it was made with."""
    import torch

    from kvpact.cache import recode
    from kvpact.evaluate import Candidate, compressed_cache
    from kvpact.integrations.transformers import key_offsets
    from kvpact.integrations.transformers.cache import recipe_of
    from kvpact.integrations.transformers.layers.rings import ring_spec
    from kvpact.snapshot import Snapshot

    held = Snapshot.load(path)
    ids = held.token_ids
    if ids is None or ids.shape[0] != 1:
        raise SnapshotError(f"{path} has no token ids, or several rows; restore it in Python")
    dtype = next(str(layer.dtype)[6:] for layer in held.manifest.layers if layer.dtype)
    network, tokenizer = inputs.open_model(model, dtype, threads)
    held.require(**_identity(network, adapter, tenant).to_json())
    # Snapshots from before key offsets go on without them.
    offsets = spec is not None or held.manifest.version > 1
    known = inputs.load_calibration(calibration, network)
    rings = ring_spec(held.records())
    if budget is None:
        source = spec or recipe_of(held, network)
    else:  # its specs are on the way: the budget that the file was made with goes on
        source = inputs.candidate_of(spec or "none", budget=budget).source
    candidate = Candidate(source, calibration=known, sliding=rings, budget=budget)
    cache = compressed_cache(network, candidate, offsets)
    if spec is not None and budget is None:
        bias, device = key_offsets(network), network.device
        held = recode(held, spec, calibration=known, key_offsets=bias, device=device)
    cache.restore(held, device=network.device)
    if prompt:
        more = tokenizer(prompt, return_tensors="pt", add_special_tokens=False)["input_ids"]
        ids = torch.cat([ids, more.to(ids.dtype)], dim=1)
    elif ids.shape[1] == held.tokens:
        cache.crop(-1)  # the last token is computed again: a snapshot holds no logits
    inputs.check_positions(network, ids.shape[1], max_new_tokens, "lower --max-new-tokens")
    note(f"tokens restored: {held.tokens}")
    stream = TextStream(tokenizer, as_json)
    inputs.continued(network, ids, cache, max_new_tokens, streamer=stream)
    if as_json:
        counts = {"restored_tokens": held.tokens, "new_tokens": len(stream.tokens)}
        print_document("snapshot restore", file=str(path), text=stream.text(), **counts)


def _identity(model: Any, adapter: str | None, tenant: str | None) -> Identity:
    from kvpact.integrations.fingerprint import model_fingerprint
    from kvpact.snapshot import Identity

    return Identity(model=model_fingerprint(model, adapter=adapter), adapter=adapter, tenant=tenant)
