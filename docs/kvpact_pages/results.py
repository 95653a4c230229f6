"""Committed results, and how their numbers are written."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from kvpact.evaluate.text import markdown

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "benchmarks" / "results"
NARROW = "\u00a0"
"""A space at which no line breaks."""
MODELS = {"smollm2": "SmolLM2-135M", "gemma3": "Gemma 3 270M"}


@cache
def load(name: str) -> Any:
    """Return what a JSON file below ``benchmarks/results`` holds."""
    return json.loads((FOLDER / name).read_text("utf-8"))


def eval_files() -> list[str]:
    """Return the names of all evaluations that are committed."""
    return sorted(str(path.relative_to(FOLDER)) for path in FOLDER.rglob("eval.json"))


def kl(value: float) -> str:
    """Return a KL with three digits that count."""
    return f"{value:.0e}".replace("e-0", "e-") if 0 < value < 1e-5 else f"{value:.5f}"


def kl_and_error(row: dict[str, Any]) -> str:
    """Return a mean KL with its standard error."""
    return f"{kl(row['kl_mean'])}{NARROW}±{NARROW}{kl(row['kl_se'])}"


def percent(value: float, digits: int = 1) -> str:
    """Return a number of percent."""
    return f"{value:.{digits}f}{NARROW}%"


def ratio(value: float) -> str:
    """Return a ratio with two digits that count."""
    return f"{value:.0f}x" if value >= 9.95 else f"{value:.1f}x"


def code(text: str) -> str:
    """Return text as code."""
    return f"`{text}`"


def table(columns: Sequence[str], rows: Sequence[Sequence[str]], left: int = 1) -> str:
    """Return a Markdown table whose first `left` columns are text and the others numbers."""
    return markdown(columns, rows, left)
