"""``kvpact calibrate``: methods learn of a model from texts; the result is one file."""

from pathlib import Path
from typing import Any

import typer

from kvpact.cli import options
from kvpact.cli.console import note, print_document, print_pairs, progress, size_text
from kvpact.cli.inputs import InputError, check_models, check_output, open_model, texts_of
from kvpact.spec import DEFAULT_SPEC, parse_spec

SPECS = ["pca", DEFAULT_SPEC]
KEPT = [DEFAULT_SPEC, f"{DEFAULT_SPEC},sinks=0"]
"""The second one is what vLLM's pages hold of the default spec: they have no place for sinks."""
_DEFAULTS = f"[default: {', '.join(KEPT)}; with --out {', '.join(SPECS)}]"


def calibrate_command(
    model: str = options.MODEL_ARGUMENT,
    out: Path | None = typer.Option(
        None,
        *options.OUT,
        show_default=False,
        dir_okay=False,
        help="File to write, for other machines; if omitted, the calibration is kept where "
        "prefixes, pages and engines find it.",
    ),
    force: bool = options.FORCE,
    text: list[Path] = options.TEXTS,
    spec: list[str] | None = options.optional(
        help="Spec to calibrate; `pca` and `trellis` learn the same at most bits. Several may be "
        f"given. {_DEFAULTS}",
        autocompletion=options.complete_spec,
    ),
    tokens: int = typer.Option(4096, min=256, help="Tokens of all texts together."),
    dtype: str = options.DTYPE,
    threads: int | None = options.THREADS,
    as_json: bool = options.JSON,
) -> None:
    """Calibrate methods to a model, for prefixes, pages, engines and pca.

    Use texts of the kinds that the model will read; about 4,000 tokens are enough.
    """
    from kvpact.calibration import Calibration

    texts = spec or (KEPT if out is None else SPECS)
    specs = [parse_spec(one) for one in dict.fromkeys(texts)]
    if out is not None:
        check_output(out, "calibration", Calibration.load, force)
    given = texts_of(text)
    check_models([model])
    network, tokenizer = open_model(model, dtype, threads)
    from kvpact.integrations.calibrations import keep, learning, name_of
    from kvpact.integrations.fingerprint import files_fingerprint, model_fingerprint, model_folder
    from kvpact.integrations.transformers import calibrate
    from kvpact.integrations.transformers.attention.learnt import text_rows

    groups = ([[one] for one in learning(specs)] if out is None else []) or [specs]
    if out is not None and len({name_of([one]) for one in specs}) > len(
        {one.key.learnt_name() for one in specs}
    ):
        raise InputError(
            f"{', '.join(map(str, specs))}: one file can't hold what they learn, which sinks or "
            "bits make different; write a file for each"
        )
    rows = text_rows(tokenizer, given, tokens)
    held = sum(map(len, rows))
    if held < tokens:
        note(f"the texts give {held} tokens, fewer than the {tokens} asked for")
    name, places = model_fingerprint(network), [out] if out else []
    k: dict[str, Any] = {}
    v: dict[str, Any] = {}
    for group in groups:
        label = ", ".join(map(str, group))
        with progress(f"calibrating {label}") as report:
            found = calibrate(network, rows, group, progress=report, fingerprint=name)
        layer = next(iter(found.layers.values()))
        k, v = {**k, **layer.k}, {**v, **layer.v}
        if out is not None:
            found.save(out)
            continue
        places.append(keep(found, name, group))
        if (folder := model_folder(network.name_or_path)) is not None:
            keep(found, files_fingerprint(folder, {}), group)
    size = sum(place.stat().st_size for place in places)
    shown = out or places[0].parent
    if as_json:
        counts = {"layers": len(found.layers), "tokens": found.tokens}
        learnt = {"k": list(k), "v": list(v)}
        print_document("calibrate", file=str(shown), bytes=size, **counts, **learnt)
        return
    rows_shown = (
        ("layers", len(found.layers)),
        ("tokens", found.tokens),
        ("learnt of K", ", ".join(k) or "-"),
        ("learnt of V", ", ".join(v) or "-"),
        ("bytes", size_text(size)),
    )
    print_pairs(("calibration", shown), rows_shown)
