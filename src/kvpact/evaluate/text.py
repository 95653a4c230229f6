"""Tables and numbers as text."""

from __future__ import annotations

from collections.abc import Sequence


def markdown(columns: Sequence[str], rows: Sequence[Sequence[str]], left: int = 1) -> str:
    """Return a Markdown table whose first `left` columns are text and the others numbers."""
    rule = ["---"] * left + ["---:"] * (len(columns) - left)
    lines = [columns, rule, *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def kl_text(value: float) -> str:
    """Return a KL with three digits that count: as a decimal, or with an exponent if tiny."""
    if 0 < abs(value) < 1e-5:
        return f"{value:.0e}"
    return f"{value:.5f}"
