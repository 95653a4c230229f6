"""What ``results.md`` and the cards take from committed results, by model: KL, bytes, times."""

from __future__ import annotations

from functools import cache
from typing import Any

from kvpact.evaluate.files import read_rows
from kvpact.spec import parse_spec
from kvpact_pages.results import (
    FOLDER,
    MODELS,
    code,
    eval_files,
    kl_and_error,
    load,
    percent,
    table,
)

_CALIBRATED = "pca/"
"""Folder of the evaluations whose caches had a calibration."""
_LIMITS = (2.5, 3.5, 4.5, 9.0)


@cache
def _every() -> list[dict[str, Any]]:
    """Return what was measured of each spec on each model, by its best protocol, least KL first."""
    found: dict[tuple[str, str], dict[str, Any]] = {}
    for file in sorted(eval_files(), key=lambda file: (not file.startswith("models/"), file)):
        for row in load(file):
            if not row["packed_only"] and "sinks=0,window=0" not in row["spec"]:
                found.setdefault((row["spec"], row["model"]), {**row, "file": file})
    return sorted(found.values(), key=lambda row: row["kl_mean"])


def measured(method: str) -> list[dict[str, Any]]:
    """Return what was measured of a method for K, the least KL first."""
    return [row for row in _every() if parse_spec(row["spec"]).key.name == method]


def _table(rows: list[dict[str, Any]], up: str) -> str:
    cells = []
    for row in rows:
        file = f"{up}benchmarks/results/{row['file'].replace('.json', '.md')}"
        figures = (f"{row['slot_bits_per_value']:.2f}", kl_and_error(row), percent(row["top1"]))
        cells.append([code(row["spec"]), *figures, f"[{row['scored']:,}]({file})"])
    return table(("spec", "bits, slots", "KL mean", "top-1", "scored"), cells)


def of_method(name: str) -> str:
    """Return the measured tables of a method's card, one for each model."""
    parts = []
    for model, said in MODELS.items():
        if rows := [row for row in measured(name) if row["model"] == model]:
            parts += [f"On {said}:", _table(rows, "../../")]
    if any(row["file"].startswith(_CALIBRATED) for row in measured(name)):
        told = "../quality.md#fewer-bits-for-what-is-stored"
        parts.append(f"These caches had a [calibration]({told}).")
    return "\n\n".join(parts) or "Nothing is committed; `kvpact eval` measures it."


def best() -> str:
    """Return the spec with the least KL on each model without a calibration, by bits."""
    rows = []
    for limit, below in zip(_LIMITS, (0.0, *_LIMITS), strict=False):
        cells = [f"{below:g} to {limit:g}" if below else f"up to {limit:g}"]
        for model in MODELS:
            found = (
                row
                for row in _every()
                if row["model"] == model
                and below < row["slot_bits_per_value"] <= limit
                and not row["file"].startswith(_CALIBRATED)
            )
            least = next(found, None)
            cells.append(f"`{least['spec']}`, {kl_and_error(least)}" if least else "not measured")
        rows.append(cells)
    return table(("bits per value of the slots", *MODELS.values()), rows, left=3)


def quality(model: str) -> str:
    """Return all that was measured of a model's quality."""
    return _table(
        [row for row in _every() if row["model"] == model and row["spec"] != "none"], "../"
    )


def times(model: str) -> str:
    """Return bytes and times of kvpact's caches over those of an exact one."""
    rows = [row for row in load("leaderboard/own.json")["rows"] if row["model"] == model]
    contexts = [step["tokens"] for step in rows[0]["steps"]]
    prompt = load("leaderboard/own.json")["about"]["prompt"]
    cells = []
    for row in rows:
        times = [row["prompt"][1], *(step["ratio"][1] for step in row["steps"])]
        last = row["steps"][-1]
        share = f"{last['bytes'] / last['exact_bytes']:.2f}"
        cells.append([code(row["cache"]), share, *(f"{t:.2f}" for t in times)])
    columns = [f"bytes after {contexts[-1]:,}", f"prompt of {prompt:,}"]
    return table(["spec", *columns, *(f"step after {n:,}" for n in contexts)], cells)


def others() -> str:
    """Return what others measured and handed on, or how to."""
    folder = FOLDER / "measured-by-others"
    found = [(row, path.name) for path in sorted(folder.glob("*.json")) for row in read_rows(path)]
    cells = []
    for row, file in found:
        p, v = row["protocol"], row["versions"]
        told = f"{p['scored']:,} of {p['text']}, {p['read']}"
        ran = f"{row['processor']}, {row['threads']} threads"
        versions = f"kvpact {v['kvpact']}, torch {v['torch']}, transformers {v['transformers']}"
        figures = (percent(100 * row["share"]), kl_and_error(row), percent(row["top1"]))
        link = f"[{told}](../benchmarks/results/measured-by-others/{file})"
        cells.append([row["model"], row["dtype"], code(row["spec"]), link, ran, versions, *figures])
    columns = ("model", "dtype", "spec", "scored tokens", "on", "versions", "of 16 bits", "KL mean")
    return table((*columns, "top-1"), cells, left=6) if cells else "Nobody has handed on a row yet."


def _blocks(model: str) -> dict[str, Any]:
    return {
        f"results-{model}-quality": lambda: quality(model),
        f"results-{model}-times": lambda: times(model),
    }


BLOCKS = {name: made for model in MODELS for name, made in _blocks(model).items()}
BLOCKS["results-others"] = others
