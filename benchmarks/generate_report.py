"""Tables and lines of `generate.py`."""

from __future__ import annotations

from typing import Any

from machine import head

Row = dict[str, Any]


def fastest(rows: list[Row], start: str) -> Row | None:
    """Return the fastest of the candidates whose names start like that."""
    return min((r for r in rows if r["candidate"].startswith(start)), key=_ms, default=None)


def _ms(row: Row) -> float:
    return row["ms"]


def lines(rows: list[Row], spec: str) -> list[str]:
    """Return a sentence per thread count and candidate of this spec, with the targets."""
    found = []
    for threads in dict.fromkeys(row["threads"] for row in rows):
        part = [row for row in rows if row["threads"] == threads]
        exact = next((r for r in part if r["candidate"] == "DynamicCache, fp32"), None)
        for row in (r for r in part if r["candidate"].startswith(spec)):
            says = [f"{threads} thread(s), {row['candidate']}"]
            for start, target in (("DynamicCache", 1), ("QuantizedCache", 2)):
                if other := fastest(part, start):
                    ratio = other["ms"] / row["ms"]
                    holds = "yes" if ratio >= target else "no"
                    says.append(f"{ratio:.2f} x {other['candidate']} (at least {target}: {holds})")
            if exact:
                share = row["cache"] / exact["cache"]
                holds = "yes" if share <= 0.15 else "no"
                says.append(f"{share:.3f} of fp32's cache bytes (at most .15: {holds})")
            found.append("; ".join(says))
    return found


def markdown(rows: list[Row], about: dict[str, object], spec: str) -> str:
    """Return a table per thread count, one of memory, and the lines."""
    parts = ["# A token of a real model on a long context\n", head(about)]
    for threads in dict.fromkeys(row["threads"] for row in rows):
        part = [row for row in rows if row["threads"] == threads]
        parts.append(f"\n## {threads} thread(s)\n")
        first = part[0]["candidate"]
        parts.append(
            f"| cache, model's dtype | ms a token | quartiles | tokens/s | times {first} |"
        )
        parts.append("|---|--:|--:|--:|--:|")
        base = part[0]["ms"]
        for r in part:
            low, high = r["ms_quartiles"]
            parts.append(
                f"| {r['candidate']} | {r['ms']:.1f} | {low:.1f}-{high:.1f} | "
                f"{1e3 / r['ms']:.1f} | {base / r['ms']:.2f} |"
            )
    parts.append("\n## Memory, MB\n")
    first = rows[0]["candidate"]
    parts.append(
        f"| cache, model's dtype | cache | of {first} | resident for it | peak of a step |"
    )
    parts.append("|---|--:|--:|--:|--:|")
    for r in memory(rows):
        share = r["cache"] / rows[0]["cache"]
        held, peak = (r["after"] - r["before"]) / 1e6, r["peak"] / 1e6
        cells = f"{r['cache'] / 1e6:.1f} | {share:.3f} | {held:.1f} | {peak:.1f}"
        parts.append(f"| {r['candidate']} | {cells} |")
    parts += ["\n## Targets\n", *(f"- {line}" for line in lines(rows, spec))]
    return "\n".join(parts) + "\n"


def memory(rows: list[Row]) -> list[Row]:
    """Return a row per candidate: memory does not depend on the threads."""
    return list({row["candidate"]: row for row in reversed(rows)}.values())[::-1]
