"""All that is written by a program: which file holds what."""

from __future__ import annotations

from pathlib import Path

from kvpact_pages import blocks, cards, faq, models, quality, readme, specs, speed, stream, support

DOCS = Path(__file__).resolve().parents[1]
PAGES = {
    "../README.md": readme.BLOCKS | models.BLOCKS,
    "faq.md": faq.BLOCKS,
    "methods/index.md": cards.BLOCKS,
    "quality.md": quality.BLOCKS,
    "specs.md": specs.BLOCKS,
    "speed.md": speed.BLOCKS,
    "support.md": support.BLOCKS,
    "which-when.md": faq.WHICH,
    "your-model.md": models.PAGE,
}


def expected() -> dict[Path, str]:
    """Return every page with its blocks, and every file that is written as a whole."""
    found = {DOCS / name: blocks.filled(_text(name), made) for name, made in PAGES.items()}
    for drawn in (quality.pictures(), speed.pictures(), stream.pictures()):
        found |= {DOCS / "pictures" / name: picture for name, picture in drawn.items()}
    return found | {DOCS / name: text for name, text in cards.files().items()}


def _text(name: str) -> str:
    return (DOCS / name).read_text("utf-8")
