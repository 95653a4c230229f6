"""Rows and tables of `attend.py`."""

from __future__ import annotations

import statistics
from typing import Any

from attend_ours import OURS, read_name
from attend_rounds import TORCH, quartiles
from machine import head

Row = dict[str, Any]


def rows_of(times: dict[str, list[float]], cap: str | None, **where: object) -> list[Row]:
    """Return a row per candidate; names that end with the cap are the capped process's."""
    medians = {name: statistics.median(found) for name, found in times.items()}
    torches = [name for name in medians if name.startswith(TORCH)]
    best = {
        kind: min((n for n in torches if is_capped(n, cap) == kind), key=medians.get, default=None)
        for kind in (False, True)
    }
    rows = []
    for name, found in times.items():
        low, middle, high = quartiles(found)
        read = medians.get(read_name(name)) if name in OURS else None
        fused, lesser = medians.get("fp16, fused"), best[True]
        rows.append(
            where
            | {
                "candidate": name,
                "ms": middle * 1e3,
                "ms_quartiles": [low * 1e3, high * 1e3],
                "ms_least": min(found) * 1e3,
                "rounds": len(found),
                "best_torch": best[False],
                "times_best_torch": medians[best[False]] / middle,
                "best_torch_capped": lesser,
                "times_best_torch_capped": medians[lesser] / middle if lesser else None,
                "times_fp16": fused / middle if fused else None,
                "over_read": middle / read if read else None,
            }
        )
    return rows


def is_capped(name: str, cap: str | None) -> bool:
    """Return whether a candidate of torch runs in the capped process."""
    return cap is not None and name.endswith(cap)


def markdown(rows: list[Row], about: dict[str, object], cap: str | None) -> str:
    """Return a table per shape, thread count and context."""
    lines = ["# Decode attention\n", head(about) + "\n"]
    if cap:
        lines.append(
            f"*Best torch, {cap}*, is for information: the same calls in a process of their own, "
            "in which torch's libraries may use less of the processor.\n"
        )
    for key in dict.fromkeys((row["shape"], row["threads"], row["tokens"]) for row in rows):
        part = [r for r in rows if (r["shape"], r["threads"], r["tokens"]) == key]
        lines += ["\n".join(table(part, cap)) + "\n"]
    return "\n".join(lines)


def table(rows: list[Row], cap: str | None) -> list[str]:
    """Return the lines of one table."""
    first = rows[0]
    capped = [f"x best torch, {cap}"] if cap else []
    names = ["", "median ms", "quartiles", "x best torch", *capped, "x own fp16", "over its read"]
    lines = [
        f"## {first['shape']}, {first['tokens']} tokens, {first['threads']} thread(s)\n",
        f"Best torch: {first['best_torch']}"
        + (f"; {cap}: {first['best_torch_capped']}" if cap else "")
        + "\n",
        "| " + " | ".join(names) + " |",
        "|" + "---|" * len(names),
    ]
    for r in rows:
        low, high = r["ms_quartiles"]
        ratios = [r["times_best_torch"], *([r["times_best_torch_capped"]] if cap else [])]
        ratios += [r["times_fp16"], r["over_read"]]
        cells = [r["candidate"], f"{r['ms']:.3f}", f"{low:.3f}-{high:.3f}"]
        cells += ["-" if ratio is None else f"{ratio:.2f}" for ratio in ratios]
        lines.append("| " + " | ".join(cells) + " |")
    return lines
