"""Links of the built site: inner ones lead to a file and an anchor, outer ones are well formed.

What doesn't hold is a warning, which `make docs` makes an error. Outer links are not visited; they
are listed in `build/docs/external-links.txt`.
"""

from __future__ import annotations

from html.parser import HTMLParser
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import unquote, urlsplit

if TYPE_CHECKING:  # Tests import this where Sphinx is not installed.
    from sphinx.application import Sphinx

_ATTRIBUTES = {"a": "href", "link": "href", "img": "src", "script": "src", "object": "data"}


class Page(HTMLParser):
    """What a page has: anchors, and links as they are written."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.anchors: set[str] = set()
        self.links: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Note the anchors and links of a tag."""
        values = dict(attrs)
        self.anchors.update(filter(None, (values.get("id"), values.get("name"))))
        if link := values.get(_ATTRIBUTES.get(tag, "")):
            self.links.add(link)


def faults(root: Path) -> tuple[list[str], list[str]]:
    """Return what is wrong with the links of the pages below `root`, and the outer links."""
    pages = {path: Page(path.read_text()) for path in sorted(root.rglob("*.html"))}
    wrong, outer = [], set()
    for path, page in pages.items():
        name = path.relative_to(root)
        for link in sorted(page.links):
            parts = urlsplit(link)
            if parts.scheme in ("http", "https"):
                outer.add(link)
                if parts.scheme != "https" or "." not in parts.netloc:
                    wrong.append(f"{name}: {link!r} is no https address")
            elif parts.scheme not in ("data", "mailto"):
                target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
                if not target.is_file():
                    wrong.append(f"{name}: {link!r} leads to no file")
                elif parts.fragment and unquote(parts.fragment) not in pages[target].anchors:
                    wrong.append(f"{name}: {link!r} leads to no anchor")
    return wrong, sorted(outer)


def check(app: Sphinx, exception: Exception | None) -> None:
    """Warn of every link that leads nowhere, once the pages are there."""
    from sphinx.util import logging

    if exception is not None or app.builder.format != "html":
        return
    root = Path(app.outdir)
    wrong, outer = faults(root)
    for line in wrong:
        logging.getLogger(__name__).warning("%s", line)
    (root / "external-links.txt").write_text("".join(f"{link}\n" for link in outer))


def setup(app: Sphinx) -> dict[str, bool]:
    """Check the links when the site is built."""
    app.connect("build-finished", check)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
