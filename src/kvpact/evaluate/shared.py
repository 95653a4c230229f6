"""Rows that whoever measured them can hand on, with all that one has to know of the run."""

from __future__ import annotations

import json
import platform
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from kvpact.evaluate.base import EvalProtocol, EvalRow, EvaluationError
from kvpact.evaluate.result import EvalResult


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
