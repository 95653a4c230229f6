"""Rows and ranks of the leaderboard, out of the files that `leaderboard.py` writes."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

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
        return self.package == OWN

    @property
    def name(self) -> str:
        """Return the cache with its package."""
        return f"{self.package}: {self.cache}"


class Measure(NamedTuple):
    """A column by which rows are ranked: the less, the better."""

    title: str
    of: Callable[[Row], float]
    text: Callable[[float], str] = "{:.2f}".format


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


def measures(rows: list[Row]) -> list[Measure]:
    """Return the columns by which rows are ranked."""
    at = middle(rows)
    return [
        Measure("KL, mean", lambda row: row.kl, figure),
        Measure("KL, 99th percentile", lambda row: row.kl_p99, figure),
        Measure(f"bits held a value at {at:,} tokens", lambda row: row.bits[at]),
        *(
            Measure(f"decode after {n:,} tokens, times DynamicCache", lambda r, n=n: r.steps[n][1])
            for n in contexts_of(rows)
        ),
        Measure("prompt, times DynamicCache", lambda row: row.prompt[1]),
    ]


def figure(value: float) -> str:
    """Return a KL with three significant figures."""
    if value < 1e-4:
        return f"{value:.3g}".replace("e-0", "e-")
    return f"{value:.5f}" if value < 1 else f"{value:.2f}"


def ranked(rows: list[Row], measure: Measure) -> tuple[Row, Row | None, int]:
    """Return the first row by a measure, kvpact's best one, and the place of that one."""
    order = sorted(rows, key=measure.of)
    best = next((row for row in order if row.own), None)
    place = 0 if best is None else 1 + sum(measure.of(row) < measure.of(best) for row in rows)
    return order[0], best, place


def beats(one: Row, other: Row, at: int) -> bool:
    """Tell whether a cache holds fewer bits at less KL than another."""
    return one.bits[at] <= other.bits[at] and one.kl < other.kl


def verdicts(rows: list[Row]) -> list[str]:
    """Say in sentences how kvpact stands on one model, from the figures alone."""
    at = middle(rows)
    own, peers = ([row for row in rows if row.own is mine] for mine in (True, False))
    unbeaten = [peer for peer in peers if not any(beats(row, peer, at) for row in own)]
    beaten = [row for row in own if any(beats(peer, row, at) for peer in peers)]
    said = [
        "Some cache of kvpact's holds fewer bits at less KL than "
        f"{len(peers) - len(unbeaten)} of {len(peers)} of other packages. "
        + listed("Not so", unbeaten, at),
        "Some cache of another package holds fewer bits at less KL than "
        f"{len(beaten)} of {len(own)} of kvpact's. " + listed("Than these", beaten, at),
    ]
    for measure in measures(rows):
        if "times" not in measure.title:
            continue
        slow = sorted((row for row in own if measure.of(row) > 1), key=measure.of)
        what = measure.title.removesuffix(", times DynamicCache")
        faster = sum(measure.of(row) < 1 for row in peers)
        text = f"None of kvpact's {len(own)} is slower than DynamicCache"
        if slow:
            worst = f"the slowest is {slow[-1].cache}, {measure.of(slow[-1]):.2f} times its time"
            text = f"{len(slow)} of kvpact's {len(own)} are slower than DynamicCache ({worst})"
        said.append(f"{what.capitalize()}: {text}; {faster} of {len(peers)} others are faster.")
    return [sentence.strip() for sentence in said]


def listed(start: str, rows: list[Row], at: int) -> str:
    """Return rows as the end of a sentence, nothing for none."""
    names = [f"{row.name} ({row.bits[at]:.2f} bits, KL {figure(row.kl)})" for row in rows]
    return f"{start}: {'; '.join(names)}." if names else ""
