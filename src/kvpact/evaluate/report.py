"""The files of an evaluation: ``eval.json``, ``eval.md`` and ``eval.png``."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict
from os import PathLike
from pathlib import Path

from kvpact.evaluate.base import EvalProtocol, EvalResult, EvalRow, row_name
from kvpact.evaluate.plot import save_plot

READING = (
    "KL: nats per token, exact cache against this one, the smaller the better (perplexity is "
    "noisier). bits/value: all bytes held, exact sinks and window included; slots: packed alone."
)


LEARNING = (
    " Methods that learn from tokens (low rank, codebooks) learn from the first chunk alone, layer "
    "by layer, and keep that; what they learnt counts among bytes and slots."
)


def write_report(result: EvalResult, directory: str | PathLike[str]) -> list[Path]:
    """Write ``eval.json``, ``eval.md`` and ``eval.png``.

    Parameters
    ----------
    result : EvalResult
        What `evaluate` returned.
    directory : str or path
        Made where missing; files of those names are replaced.

    Returns
    -------
    list of Path
        The three files.

    Raises
    ------
    OSError
        The directory can't be made or written to.
    BackendUnavailable
        matplotlib is not installed; the first two files are there.
    """
    folder = Path(directory)
    folder.mkdir(parents=True, exist_ok=True)
    data, table, plot = (folder / f"eval.{ending}" for ending in ("json", "md", "png"))
    rows = [{key: _json(value) for key, value in asdict(row).items()} for row in result.rows]
    data.write_text(json.dumps(rows, indent=2) + "\n", encoding="utf-8")
    text = (
        "# Quality of compressed KV caches\n\n"
        f"{protocol_text(result.protocol, result.rows)}\n\n"
        f"{markdown_table(result.rows)}\n\n{READING}\n"
    )
    table.write_text(text, encoding="utf-8")
    save_plot(result.rows, plot, title=_plot_title(result.protocol))
    return [data, table, plot]


def _json(value: object) -> object:
    """Return the value, or None for NaN and infinity, which JSON does not have."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def markdown_table(rows: Sequence[EvalRow]) -> str:
    """Return the rows as a Markdown table."""
    cells = [[cell(row) for cell in _COLUMNS.values()] for row in rows]
    lines = [list(_COLUMNS), ["---", *["---:"] * (len(_COLUMNS) - 1)], *cells]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def protocol_text(protocol: EvalProtocol, rows: Sequence[EvalRow]) -> str:
    """Return how it was measured, in a few sentences."""
    versions = ", ".join(f"{name} {version}" for name, version in protocol.versions.items())
    native = max((row.layers_native for row in rows), default=0)
    return (
        f"{protocol.model or 'model'} ({protocol.dtype}, {protocol.device}), "
        f"{protocol.tokens} tokens of {protocol.text or 'text'} in chunks of {protocol.chunk}, "
        f"{protocol.scored} scored: teacher-forced, the first chunk left out; a chunk attends to "
        "itself exactly (packed only: as stored) and to the past as stored; the exact reference "
        f"is chunked alike and has perplexity {protocol.reference_perplexity:.4f}."
        + (LEARNING if any(row.fitted for row in rows) else "")
        + (f" {native} layers are no full attention and stay uncompressed." if native else "")
        + f" {versions}; {protocol.threads} threads."
    )


def _plot_title(protocol: EvalProtocol) -> str:
    where = " on ".join(filter(None, (protocol.model, protocol.text)))
    return f"{where}: {protocol.tokens} tokens in chunks of {protocol.chunk}".removeprefix(": ")


def kl_text(value: float) -> str:
    """Return a KL with three digits that count: as a decimal, or with an exponent if tiny."""
    if 0 < abs(value) < 1e-5:
        return f"{value:.0e}"
    return f"{value:.5f}"


_COLUMNS: dict[str, Callable[[EvalRow], str]] = {
    "spec": lambda row: row_name(row, "`"),
    "bits/value": lambda row: f"{row.bits_per_value:.3f}",
    "slots": lambda row: f"{row.slot_bits_per_value:.3f}",
    "MB": lambda row: f"{row.bytes / 1e6:.2f}",
    "perplexity": lambda row: f"{row.perplexity:.4f}",
    "change %": lambda row: f"{row.perplexity_change:+.3f}",
    "± %": lambda row: f"{row.perplexity_change_se:.3f}",
    "KL mean": lambda row: kl_text(row.kl_mean),
    "KL median": lambda row: kl_text(row.kl_median),
    "KL p99": lambda row: kl_text(row.kl_p99),
    "KL max": lambda row: kl_text(row.kl_max),
    "top-1 %": lambda row: f"{row.top1:.2f}",
    "sinks": lambda row: str(row.sinks),
    "window": lambda row: str(row.window),
    "seconds": lambda row: f"{row.seconds:.1f}",
}
