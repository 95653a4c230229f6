"""Print where the tests of a wing lie, as arguments of pytest: `make test WING=core`.

    python tools/wings.py WING

The table of ARCHITECTURE.md says which package belongs to which wing. A package's tests have its
name below ``tests``; those of the modules beside the packages lie on its floor and, for the
contract, in ``conformance``. What concerns no package (documents, benchmarks, wheels, the
repository itself) is the wing ``project``.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
ROW = re.compile(r"^\| `([^`]+)` \| [\d,]+ \| (\w+) \|", re.MULTILINE)
SHARED = {"conformance", "helpers", "golden", "__pycache__"}


def wings(root: Path) -> dict[str, list[str]]:
    """Return the packages of each wing, in the table's order."""
    found: dict[str, list[str]] = {}
    for package, wing in ROW.findall((root / "ARCHITECTURE.md").read_text("utf-8")):
        found.setdefault(wing, []).append(package)
    return found


def arguments(root: Path, wing: str) -> list[str]:
    """Return pytest's arguments for a wing: folders and files, and what in them is another's."""
    table, tests = wings(root), root / "tests"
    every = {package for packages in table.values() for package in packages}
    names = {path.name for path in tests.iterdir() if path.is_dir()} - SHARED
    table["project"] = sorted(name for name in names if name not in every)
    if wing not in table:
        sys.exit(f"no wing is called {wing!r}; there are {', '.join(table)}")
    words: list[str] = []
    for package in table[wing]:
        folder = tests / package
        if package == "(files)":
            words += [
                "tests/conformance",
                *sorted(f"tests/{x.name}" for x in tests.glob("test_*.py")),
            ]
        elif folder.is_dir():
            words.append(str(folder.relative_to(root)))
            others = (x for x in every - {*table[wing]} if x.startswith(f"{package}/"))
            words += sorted(f"--ignore=tests/{x}" for x in others)
    return words


def main() -> None:
    """Print the arguments."""
    if len(sys.argv) != 2:
        sys.exit(f"usage: python tools/wings.py WING, one of {', '.join(wings(ROOT))}, project")
    print(*arguments(ROOT, sys.argv[1]))


if __name__ == "__main__":
    main()
