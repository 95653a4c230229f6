"""Writes what an installation knows of kvpact: ``metadata.py PYPROJECT FOLDER``.

With FOLDER in PYTHONPATH the methods of a source tree are found, which entry points name.
"""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path


def write(project: Path, folder: Path) -> None:
    """Write FOLDER/kvpact-VERSION.dist-info."""
    known = tomllib.loads(project.read_text("utf-8"))["project"]
    source = (project.parent / "src" / "kvpact" / "__init__.py").read_text("utf-8")
    version = source.split('__version__ = "')[1].split('"')[0]
    place = folder / f"kvpact-{version}.dist-info"
    place.mkdir(parents=True, exist_ok=True)
    lines = []
    for group, entries in known["entry-points"].items():
        lines += [f"[{group}]", *(f"{name} = {target}" for name, target in entries.items()), ""]
    (place / "entry_points.txt").write_text("\n".join(lines), "utf-8")
    told = f"Metadata-Version: 2.1\nName: kvpact\nVersion: {version}\n"
    (place / "METADATA").write_text(told, "utf-8")


if __name__ == "__main__":
    write(Path(sys.argv[1]), Path(sys.argv[2]))
