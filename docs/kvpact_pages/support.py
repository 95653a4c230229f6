"""The support matrix, from `support.toml`: every answer names the test that shows it."""

from __future__ import annotations

import ast
import json
import re
import tomllib
from functools import cache
from pathlib import Path
from typing import Any

from kvpact_pages.results import ROOT, table

STATES = ("yes", "in part", "refused", "not run", "-")
PROVEN = STATES[:3]
_DATA = tomllib.loads((Path(__file__).parent / "support.toml").read_text("utf-8"))
ENGINES: dict[str, str] = _DATA["engines"]
STRUCTURES: list[dict[str, Any]] = _DATA["structure"]
REFUSED: list[dict[str, str]] = _DATA["refused"]


@cache
def functions(file: str) -> frozenset[str]:
    """Return the names of a file's tests; none where there is no such file."""
    path = ROOT / file
    if not path.is_file():
        return frozenset()
    nodes = ast.walk(ast.parse(path.read_text("utf-8")))
    found = (node.name for node in nodes if isinstance(node, ast.FunctionDef))
    return frozenset(name for name in found if name.startswith("test"))


def exists(test: str) -> bool:
    """Tell whether a test, ``FILE::FUNCTION`` or ``FILE::*`` for all of a file, is there."""
    file, _, name = test.partition("::")
    return bool(functions(file)) if name == "*" else name in functions(file)


def tests() -> list[str]:
    """Return all tests that the matrix names."""
    named = [test for one in STRUCTURES for x in ENGINES for test in one[x].get("tests", ())]
    return [*named, *(one["test"] for one in REFUSED)]


def anchor(name: str) -> str:
    """Return the anchor of a heading, as GitHub makes it."""
    return re.sub(r"[^\w\- ]", "", name.lower()).replace(" ", "-")


def linked(test: str) -> str:
    """Return a test as a link to its file."""
    file, _, name = test.partition("::")
    shown = file.removeprefix("tests/") if name == "*" else name
    return f"[`{shown}`](../{file})"


def _shown(cell: dict[str, Any]) -> str:
    return "no test" if cell.get("untested") else ", ".join(map(linked, cell.get("tests", ())))


def matrix() -> str:
    """Return the matrix."""
    rows = [
        [
            f"[{one['name']}](#{anchor(one['name'])})",
            *(f"**{s}**" if (s := one[e]["state"]) == "refused" else s for e in ENGINES),
        ]
        for one in STRUCTURES
    ]
    return table(("", *ENGINES.values()), rows, left=5)


def details() -> str:
    """Return a section for each structure: what is known of each engine, and the tests."""
    parts = []
    for one in STRUCTURES:
        cells = [(said, one[engine]) for engine, said in ENGINES.items()]
        rows = [[said, c["state"], c.get("text", ""), _shown(c)] for said, c in cells]
        parts += [f"### {one['name']}", one["about"], table(("", "", "", "shown by"), rows, left=4)]
    return "\n\n".join(parts)


def refusals() -> str:
    """Return what is refused, with the error and the test."""
    rows = [
        [one["what"], f"`{one['error']}`: … {one['says']} …", linked(one["test"])]
        for one in REFUSED
    ]
    return table(("what", "error", "shown by"), rows, left=3)


def operations() -> str:
    """Return what can be done with a cache of each model, and why something is refused."""
    found = json.loads((Path(__file__).parent / "operations.json").read_text("utf-8"))
    said = (text for outcomes in found.values() for text in outcomes.values())
    whys = [text for text in dict.fromkeys(said) if text.startswith("refused")]
    marks = {"right": "yes"} | {why: f"no ({n})" for n, why in enumerate(whys, 1)}
    rows = [[f"`{x}`", *(marks.get(y, y) for y in found[x].values())] for x in found]
    notes = [f"{n}. {why.partition(': ')[2]}" for n, why in enumerate(whys, 1)]
    return "\n".join([table(("model", *found["llama"]), rows, left=1), "", *notes])


def versions() -> str:
    """Return what passed beside each version of transformers."""
    found = json.loads((Path(__file__).parent / "versions.json").read_text("utf-8"))
    rows = []
    for one in found:
        version, kinds = one["version"], [x for x in one.values() if isinstance(x, dict)]
        parts = [f"{x['passed']} / {x['skipped']} / {x['failed']}" for x in kinds]
        total = {name: sum(x[name] for x in kinds) for name in kinds[0]}
        share = total["skipped"] / sum(total.values())
        rows.append([version, *parts, f"{share:.0%}"])
    heads = ("transformers", "six families", "first programs", "integration", "skipped")
    return table(heads, rows, left=1)


BLOCKS = {
    "support-versions": versions,
    "support-operations": operations,
    "support-matrix": matrix,
    "support-details": details,
    "support-refusals": refusals,
}
