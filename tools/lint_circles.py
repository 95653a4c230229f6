"""Finds modules that import one another in a circle, wherever in them the import stands.

    python tools/lint_circles.py src

Imports for types alone and imports within functions count, too: a circle says that two modules are
one, or that something in them belongs to a third, however late it is imported.
"""

from __future__ import annotations

import ast
import sys
from pathlib import Path


def modules(root: Path) -> dict[str, str]:
    """Return the source of each module below `root` by its full name."""
    found = {}
    for path in root.rglob("*.py"):
        parts = path.relative_to(root).with_suffix("").parts
        found[".".join(part for part in parts if part != "__init__")] = path.read_text("utf-8")
    return found


def imported(name: str, source: str, known: set[str]) -> set[str]:
    """Return which of the known modules a module imports, by their full names."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and node.module:
            inner = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= inner if inner <= known else {node.module, *(inner & known)}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return (found & known) - {name}


def circles(sources: dict[str, str]) -> list[list[str]]:
    """Return the modules of each circle (modules that reach each other), sorted."""
    known = set(sources)
    graph = {name: imported(name, source, known) for name, source in sources.items()}
    reached = {name: _reach(name, graph) for name in graph}
    rings = (sorted(b for b in reached[a] if a in reached[b]) for a in graph if a in reached[a])
    return sorted(map(list, {tuple(ring) for ring in rings}))


def _reach(start: str, graph: dict[str, set[str]]) -> set[str]:
    seen: set[str] = set()
    waiting = list(graph[start])
    while waiting:
        name = waiting.pop()
        if name not in seen:
            seen.add(name)
            waiting += graph[name]
    return seen


def main() -> None:
    """Print the circles below the folders given, and exit with 1 if there are any."""
    found = [ring for root in sys.argv[1:] for ring in circles(modules(Path(root)))]
    for ring in found:
        print(f"these modules import one another in a circle: {', '.join(ring)}")
    sys.exit(1 if found else 0)


if __name__ == "__main__":
    main()
