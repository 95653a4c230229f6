"""The files of an evaluation: JSON for programs, rows to hand on, Markdown and plots."""

from __future__ import annotations

import json
import platform
import re
from collections.abc import Sequence
from dataclasses import asdict
from os import PathLike
from pathlib import Path
from typing import Any

import torch

from kvpact.evaluate import report
from kvpact.evaluate.base import EvalProtocol, EvalRow, EvaluationError, row_name, run_name
from kvpact.evaluate.compare import baseline_index, differences, summarize
from kvpact.evaluate.growth import GrowthPanel, GrowthResult
from kvpact.evaluate.plot import save_panels, save_plot, save_summary_plot
from kvpact.evaluate.result import PROBES, EvalResult
from kvpact.files import json_ready


def write_report(
    results: EvalResult | Sequence[EvalResult],
    directory: str | PathLike[str],
    *,
    against: str | None = None,
) -> list[Path]:
    """Write ``eval.json``, ``eval.md`` and plots.

    Parameters
    ----------
    results : EvalResult or sequence of EvalResult
        What `evaluate` returned, one for each model and text, of the same candidates.
    directory : str or path
        Made where missing; files of those names are replaced.
    against : str, optional
        As of `differences`.

    Returns
    -------
    list of Path
        ``eval.json`` (a list of rows: fields of `EvalRow`, of `EvalProtocol`, and of
        `Difference` where the row has one), ``eval.md``, ``eval.png``. Of several runs
        ``eval-MODEL-TEXT.png`` each, ``summary.json`` and ``summary.png``. Of runs with a free
        run ``free_running.json`` and ``free_running.png``, with tasks ``tasks.json`` and
        ``tasks.png``.

    Raises
    ------
    EvaluationError
        `against` is no candidate, or the results have unlike candidates; nothing is written.
    BackendUnavailable
        matplotlib is not installed; the files that need none are there.
    """
    runs = [results] if isinstance(results, EvalResult) else list(results)
    summary = summarize(runs, against) if len(runs) > 1 else []
    data = report_data(runs, against)
    folder = Path(directory)
    folder.mkdir(parents=True, exist_ok=True)
    written = [write_json(folder / "eval.json", data["rows"])]
    text = ["# Quality of compressed KV caches"]
    if len(runs) > 1:
        written.append(write_json(folder / "summary.json", data["summary"]))
        text += [
            f"## {len(runs)} runs",
            *filter(None, (report.summary_table(summary), report.PAIRED)),
        ]
    for run in runs:
        text += _sections(run, against, heading=len(runs) > 1)
    text.append(report.READING)
    written.append(folder / "eval.md")
    written[-1].write_text("\n\n".join(text) + "\n", encoding="utf-8")
    for run, name in zip(runs, _plot_names(runs), strict=True):
        written.append(folder / name)
        sizes = f"{run.protocol.tokens} tokens in chunks of {run.protocol.chunk}"
        save_plot(run.rows, written[-1], title=f"{run_name(run.protocol)}: {sizes}")
    if summary:
        written.append(folder / "summary.png")
        save_summary_plot(runs, written[-1])
    for name in PROBES:
        panels = [(run_name(x.protocol), x.probes[name]) for x in runs if name in x.probes]
        if panels:
            written.append(write_json(folder / f"{name}.json", data[name]))
            written.append(folder / f"{name}.png")
            save_panels(panels, written[-1])
    return written


def write_growth(runs: Sequence[GrowthResult], directory: str | PathLike[str]) -> list[Path]:
    """Write ``growth.json``, then ``growth.png``, which needs matplotlib; return their paths."""
    folder = Path(directory)
    folder.mkdir(parents=True, exist_ok=True)
    written = [write_json(folder / "growth.json", [asdict(run) for run in runs])]
    written.append(folder / "growth.png")
    panels = [(run.name, GrowthPanel(run, what)) for run in runs for what in ("kl", "needle")]
    save_panels(panels, written[-1])
    return written


def report_data(runs: Sequence[EvalResult], against: str | None = None) -> dict[str, list[Any]]:
    """Return what a report's JSON files hold: ``rows``, ``summary``, and a list for each probe."""
    summary = summarize(runs, against) if len(runs) > 1 else []
    data: dict[str, list[Any]] = {
        "rows": [row for run in runs for row in _rows(run, against)],
        "summary": [asdict(row) for row in summary],
    }
    for name in PROBES:
        found = [(run.protocol, run.probes[name]) for run in runs if name in run.probes]
        data[name] = [{**asdict(protocol), **probe.data()} for protocol, probe in found]
    return data


def write_json(path: Path, data: Any) -> Path:
    """Write data as JSON; NaN and infinity, which JSON does not have, become null."""
    path.write_text(json.dumps(json_ready(data), indent=2) + "\n", encoding="utf-8")
    return path


def _rows(run: EvalResult, against: str | None) -> list[dict[str, Any]]:
    """Return the rows of a run, each with how it was measured."""
    protocol = asdict(run.protocol)
    baseline_index(run.rows, against)
    pairs = {x.spec: asdict(x) for x in differences(run, against)} if run.scores else {}
    # The row's own spec stays: in a difference it is marked where the row is packed only.
    return [
        {**asdict(row), **protocol, **pairs.get(row_name(row), {}), "spec": row.spec}
        for row in run.rows
    ]


def _sections(run: EvalResult, against: str | None, *, heading: bool) -> list[str]:
    paired = report.difference_table(differences(run, against)) if run.scores else ""
    parts = [f"## {run_name(run.protocol)}" if heading else ""]
    parts += [report.protocol_text(run.protocol, run.rows), report.markdown_table(run.rows), paired]
    for probe in run.probes.values():
        parts += [probe.about(), *probe.tables()]
    return [part for part in parts if part]


def _plot_names(runs: Sequence[EvalResult]) -> list[str]:
    """Return a file name for each run's plot."""
    if len(runs) == 1:
        return ["eval.png"]
    names: list[str] = []
    for run in runs:
        words = (Path(run.protocol.model).name, Path(run.protocol.text).stem)
        name = re.sub(r"[^\w.-]+", "_", "-".join(("eval", *filter(None, words))))
        names.append(name if name not in names else f"{name}-{len(names) + 1}")
    return [f"{name}.png" for name in names]


def shared_rows(runs: Sequence[EvalResult]) -> list[dict[str, Any]]:
    """Return a row for each cache of each run but the exact one; of folders the name is kept."""
    return [_row(x, run.protocol) for run in runs for x in run.rows if x.spec != "none"]


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a file that ``kvpact eval --report`` wrote."""
    try:
        rows: list[dict[str, Any]] = json.loads(path.read_text("utf-8"))
        [(row["spec"], row["share"], row["versions"]["kvpact"]) for row in rows]
    except (ValueError, KeyError, TypeError) as error:
        raise EvaluationError(f"{path} is no report of kvpact eval") from error
    return rows


def processor(device: str = "cpu") -> str:
    """Return the name of what computed, as far as it is known."""
    if device.startswith("cuda"):
        return torch.cuda.get_device_name(torch.device(device))
    info = Path("/proc/cpuinfo")
    lines = info.read_text("utf-8").splitlines() if info.is_file() else []
    names = [line.partition(":")[2] for line in lines if line.startswith("model name")]
    name = names[0].strip() if names else platform.processor()
    return " ".join(dict.fromkeys((platform.machine(), name))).strip()


def _row(row: EvalRow, protocol: EvalProtocol) -> dict[str, Any]:
    """Return the row of a cache."""
    exact_new = row.exact_new and not row.window and protocol.chunk > 1
    read = "new tokens exact" if exact_new else "as decoding reads"
    sizes = {name: getattr(protocol, name) for name in ("text", "tokens", "chunk", "scored")}
    figures = {name: getattr(row, name) for name in ("kl_mean", "kl_se", "top1", "share")}
    folder = Path(protocol.model)
    return {
        "model": folder.name if folder.exists() else protocol.model,
        "spec": row.spec,
        **figures,
        "protocol": {**sizes, "read": "packed only" if row.packed_only else read},
        "dtype": protocol.dtype,
        "processor": processor(protocol.device),
        "threads": protocol.threads,
        "versions": {**protocol.versions, "python": platform.python_version()},
    }
