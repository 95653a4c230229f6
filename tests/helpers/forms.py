"""Cases of which one per form is in `make test`, where Triton is interpreted; the rest is slow."""

import re
from collections.abc import Iterable
from typing import Any

import pytest


def form(spec: str) -> str:
    """Return a spec without its numbers; whether codes fill bytes is left of them."""
    return re.sub(r"\d+", lambda m: "4" if m[0] in ("1", "2", "4", "8") else "3", spec)


def slow(*cases: Any) -> list[Any]:
    """Return cases, specs or tuples, marked as slow."""
    each = (case if isinstance(case, tuple) else (case,) for case in cases)
    return [pytest.param(*values, marks=pytest.mark.slow) for values in each]


def one_per_form(cases: Iterable[Any]) -> list[Any]:
    """Return cases (specs, or tuples with a side), slow from the second of a form and side on."""
    seen: set[tuple[str, ...]] = set()
    marked = []
    for case in cases:
        values = case if isinstance(case, tuple) else (case,)
        kind = (form(values[0]), *(x for x in values[1:2] if x in ("k", "v")))
        marked += slow(values) if kind in seen else [pytest.param(*values)]
        seen.add(kind)
    return marked
