"""Rows of the leaderboard, out of the files that `leaderboard.py` writes."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

OWN = "kvpact"
EXACT_BITS = 32  # of DynamicCache: the models compute in fp32
MODELS = {"smollm2": "SmolLM2-135M", "gemma3": "Gemma 3 270M"}
Spread = tuple[float, float, float]


@dataclass(frozen=True)
class Row:
    """A cache on a model; of ratios to DynamicCache, quartiles."""

    model: str
    package: str
    version: str
    cache: str
    kl: float
    kl_se: float
    kl_p99: float
    top1: float
    bits: dict[int, float]
    prompt: Spread
    steps: dict[int, Spread]

    @property
    def own(self) -> bool:
        """Whether it is one of kvpact's."""
        return self.package == OWN and "as vLLM's" not in self.cache


def load(folder: Path) -> list[dict[str, Any]]:
    """Return what was found of each contender, kvpact first, then by package."""
    files = sorted(folder.glob("*.json"))
    if not files:
        raise SystemExit(f"nothing in {folder}; make leaderboard-run measures")
    found = [json.loads(path.read_text("utf-8")) for path in files]
    return sorted(found, key=lambda one: (one["package"] != OWN, one["package"]))


def rows_of(found: list[dict[str, Any]]) -> list[Row]:
    """Return all rows."""
    rows = []
    for one, row in ((each, row) for each in found for row in each["rows"]):
        steps = {step["tokens"]: step for step in row["steps"]}
        bits = {n: EXACT_BITS * s["bytes"] / s["exact_bytes"] for n, s in steps.items()}
        times = tuple(row["prompt"]), {n: tuple(step["ratio"]) for n, step in steps.items()}
        kl = row["kl_mean"], row["kl_se"], row["kl_p99"], row["top1"]
        what = row["model"], one["package"], one["version"], row["cache"]
        rows.append(Row(*what, *kl, bits, *times))
    return rows


def kl_about(one: dict[str, Any], model: str) -> dict[str, Any]:
    """Return how the KL of a contender was measured on a model: in its run, or apart, later."""
    about: dict[str, Any] = one["about"]
    return about.get("kl", {}).get(model, about)


def models_of(rows: list[Row]) -> list[str]:
    """Return the models in their order."""
    return list(dict.fromkeys(row.model for row in rows))


def contexts_of(rows: list[Row]) -> list[int]:
    """Return the contexts that every row has."""
    return sorted(set.intersection(*(set(row.steps) for row in rows)))


def middle(rows: list[Row]) -> int:
    """Return the context at which bits are compared."""
    contexts = contexts_of(rows)
    return contexts[len(contexts) // 2]


def figure(value: float) -> str:
    """Return a KL with three significant figures."""
    if value < 1e-4:
        return f"{value:.3g}".replace("e-0", "e-")
    return f"{value:.5f}" if value < 1 else f"{value:.2f}"
