"""Hold the packages within their budgets of lines: the table of ARCHITECTURE.md.

    python tools/budgets.py

Counted are the lines of Python and C++ in a package's folder, without those of packages in it that
have a row of their own; ``(files)`` are the modules beside the packages. A package that outgrows
its budget fails `make lint`: what it needs more is either taken away elsewhere, or decided on by
changing the table in the same commit.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).parents[1]
SOURCES = (".py", ".cpp", ".h")
ROW = re.compile(r"^\| `([^`]+)` \| ([\d,]+) \|", re.MULTILINE)


def lines(folder: Path) -> int:
    """Return the lines of a folder's sources."""
    files = (path for path in folder.rglob("*") if path.suffix in SOURCES)
    return sum(len(path.read_bytes().splitlines()) for path in files)


def found(root: Path, rows: Iterable[str]) -> dict[str, int]:
    """Return the lines by row of the table: a package without the rows below it, a whole tree."""
    source = root / "src" / "kvpact"
    packages = {path.name for path in source.iterdir() if path.is_dir()} - {"__pycache__"}
    packages |= {row for row in rows if (source / row).is_dir()}
    whole = {name: lines(source / name) for name in packages}
    counts = {
        name: total - sum(whole[x] for x in packages if x.startswith(f"{name}/"))
        for name, total in whole.items()
    }
    counts["src"] = lines(source)
    counts["(files)"] = counts["src"] - sum(whole[x] for x in packages if "/" not in x)
    return {**counts, **{name: lines(root / name) for name in ("tests", "benchmarks")}}


def complaints(budgets: dict[str, int], counts: dict[str, int]) -> list[str]:
    """Return what is wrong: packages without a budget, or beyond it, and budgets of nothing."""
    said = [f"{name} has no budget in ARCHITECTURE.md" for name in counts.keys() - budgets.keys()]
    said += [f"{name} has a budget and is not there" for name in budgets.keys() - counts.keys()]
    said += [
        f"{name} has {counts[name]:,} lines, {counts[name] - most:,} more than its budget of "
        f"{most:,}"
        for name, most in budgets.items()
        if counts.get(name, 0) > most
    ]
    return sorted(said)


def main() -> None:
    """Print what is wrong, and exit with 1 if anything is."""
    table = (ROOT / "ARCHITECTURE.md").read_text("utf-8")
    budgets = {name: int(most.replace(",", "")) for name, most in ROW.findall(table)}
    said = complaints(budgets, found(ROOT, budgets))
    print("\n".join(said), end="\n" if said else "")
    sys.exit(1 if said else 0)


if __name__ == "__main__":
    main()
