"""Tables, numbers and verdicts as text."""

from collections.abc import Sequence

VERDICTS = (("very close", 0.0005), ("close", 0.002), ("visible", 0.02))
"""Largest mean KL of each verdict, in nats per token against the exact cache; ``broken`` is above.

- ``very close``: what 8-bit formats cost. The most probable token differs on about one token in a
  hundred, and there only between candidates that are nearly as probable.
- ``close``: what good 4-bit formats cost; perplexity rises by some tenths of a percent.
- ``visible``: the most probable token differs on some five tokens in a hundred, so texts soon go
  other ways, and tasks that hang on single tokens lose.
- ``broken``: the model is another one.

Up to `ROUNDING`, the arithmetic's own, it is ``exact``; below `LEAST_SCORED` tokens there is none.
They are conventions, read off teacher-forced runs of small models. A KL is a mean over tokens of
one text; ``kvpact eval --tasks all`` tells whether a task of yours is hurt.
"""
ROUNDING, LEAST_SCORED = 1e-9, 500


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


def verdict_of(kl: float, scored: int = LEAST_SCORED) -> str:
    """Return the verdict on a mean KL of so many scored tokens; NaN is ``broken``."""
    if kl <= ROUNDING:
        return "exact"
    if scored < LEAST_SCORED:
        return "no verdict"
    return next((name for name, most in VERDICTS if kl <= most), "broken")
