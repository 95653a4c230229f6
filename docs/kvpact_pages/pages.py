"""All that is written by a program: which file holds what, and the blocks of a page."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path

from kvpact_pages import (
    by_model,
    cards,
    faq,
    leaderboard,
    llama,
    models,
    quality,
    readme,
    speed,
    stream,
    support,
)

DOCS = Path(__file__).resolve().parents[1]
PAGES: dict[str, Mapping[str, Callable[[], str]]] = {
    "../README.md": readme.BLOCKS | models.BLOCKS,
    "faq.md": faq.BLOCKS,
    "leaderboard.md": leaderboard.BLOCKS,
    "llama-cpp.md": llama.BLOCKS,
    "methods/index.md": cards.BLOCKS,
    "quality.md": quality.BLOCKS,
    "results.md": by_model.BLOCKS | {"quality-coverage": quality.coverage},
    "specs.md": {"specs-bits": cards.every},
    "speed.md": speed.BLOCKS,
    "stream.md": stream.BLOCKS,
    "support.md": support.BLOCKS,
    "which-when.md": faq.WHICH,
    "your-model.md": models.PAGE,
}
BLOCK = re.compile(
    r"(<!-- generated: (?P<name>[\w-]+) -->\n).*?(<!-- end of (?P=name) -->)", re.DOTALL
)
"""A part of a page that is written by a program, between two comments."""


def filled(page: str, made: Mapping[str, Callable[[], str]]) -> str:
    """Return a page with what each of its blocks should hold; `KeyError` for an unknown block."""

    def replaced(found: re.Match[str]) -> str:
        text = made[found["name"]]().strip("\n")
        return f"{found[1]}\n{text}\n\n{found[3]}"

    return BLOCK.sub(replaced, page)


def stale() -> dict[Path, str]:
    """Return every file that is not what it should be, with what it should be."""
    found = {DOCS / name: filled((DOCS / name).read_text("utf-8"), PAGES[name]) for name in PAGES}
    for drawn in (quality.pictures(), speed.pictures(), stream.pictures()):
        found |= {DOCS / "pictures" / name: picture for name, picture in drawn.items()}
    found |= {DOCS / name: text for name, text in cards.files().items()}
    return {p: t for p, t in found.items() if not p.exists() or p.read_text("utf-8") != t}
