"""Places where a long spec may be broken in a narrow table: behind its commas and slashes."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # Tests import this where Sphinx is not installed.
    from sphinx.application import Sphinx

_CODE = re.compile(r'(?<=<span class="pre">)[^<]+(?=</span>)')
_BEHIND = re.compile(r"(?<=[,/])(?=\w)")


def breakable(html: str) -> str:
    """Return HTML whose inline code may be broken; what is copied from it stays the same."""
    return _CODE.sub(lambda found: _BEHIND.sub("<wbr>", found[0]), html)


def change(app: Sphinx, page: str, template: str, context: dict[str, Any], doctree: Any) -> None:
    """Change a page before it is written."""
    if "body" in context:
        context["body"] = breakable(context["body"])


def setup(app: Sphinx) -> dict[str, bool]:
    """Take part in the writing of every page."""
    app.connect("html-page-context", change)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
