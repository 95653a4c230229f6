"""Files of the repository in the site: whole ones as pages, others as files to download.

A page that names a file, as ``{repository} ARCHITECTURE.md`` in braces does in
`docs/architecture.md`, shows it; `docs/tutorial.ipynb` is a link to a notebook. Links of any page
to such a file lead to its page, and links to other files outside of `docs/` are downloads, so the
same text can be read in the repository and on the site.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # Tests import this where Sphinx is not installed.
    from sphinx.application import Sphinx

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
PAGES = {
    "ARCHITECTURE.md": "architecture.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "README.md": "index.md",
    "examples/notebooks/1_try_it_on_your_model.ipynb": "tutorial.ipynb",
}
_WHOLE = re.compile(r"\{repository\} (\S+)\n")
_PICTURE = re.compile(r'(\bsrc(?:set)?=")docs/')
_LINK = re.compile(r"\]\((?!https?://|data:|#|<)([^)#\s]+)(#[^)\s]*)?\)")
_CODE = re.compile(r"(^ *```.*?^ *```$|`[^`\n]+`)", re.MULTILINE | re.DOTALL)


def read(app: Sphinx, docname: str, source: list[str]) -> None:
    """Put a file in the place of a page that names it, and let links lead to what the site has."""
    page = Path(app.env.doc2path(docname))
    here, folder = page.resolve().parent, page.parent
    if whole := _WHOLE.match(source[0]):
        path = ROOT / whole[1]
        app.env.note_dependency(str(path))
        source[0] = _PICTURE.sub(r"\1", path.read_text("utf-8")) + source[0][whole.end() :]
        here = path.parent
    pieces = _CODE.split(source[0])
    for index in range(0, len(pieces), 2):
        pieces[index] = _LINK.sub(lambda link: _target(link, here, folder), pieces[index])
    source[0] = "".join(pieces)


def _target(link: re.Match[str], here: Path, folder: Path) -> str:
    """Return a link of a text that stands in `here` for a page of `folder`."""
    path, anchor = (here / link[1]).resolve(), link[2] or ""
    if path.is_dir() and (path / "README.md").is_file():
        path = path / "README.md"
    if not path.is_relative_to(ROOT) or path == DOCS:
        return link[0]
    page = PAGES.get(str(path.relative_to(ROOT)))
    if page is None and path.is_relative_to(DOCS):
        return f"]({os.path.relpath(path, folder)}{anchor})"
    if page is None:
        return _download(path, folder)
    # Sphinx would follow the link of a notebook out of `docs/`; the page stands without ending.
    return f"]({os.path.relpath(DOCS / page.removesuffix('.ipynb'), folder)}{anchor})"


def _download(path: Path, folder: Path) -> str:
    # "path:" tells MyST that even a Markdown file is to be handed out as it is.
    return f"](path:{os.path.relpath(path, folder)})"


def setup(app: Sphinx) -> dict[str, bool]:
    """Take part in the reading of every page."""
    app.connect("source-read", read)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
