"""Where code may be broken: a spec behind its commas and slashes, a signature at any space."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # Tests import this where Sphinx is not installed.
    from sphinx.application import Sphinx

_CODE = re.compile(r'(?<=<span class="pre">)[^<]+(?=</span>)')
_BEHIND = re.compile(r"(?<=[,/])(?=\w)")
_SIGNATURE = re.compile(r'<dt class="sig .*?</dt>', re.DOTALL)
_UNBROKEN = re.compile(r'<span class="(?:pre|w)">([^<]*)</span>')


def breakable(html: str) -> str:
    """Return HTML whose code may be broken; what is copied from it stays the same."""
    html = _SIGNATURE.sub(lambda found: _UNBROKEN.sub(r"\1", found[0]), html)
    return _CODE.sub(lambda found: _BEHIND.sub("<wbr>", found[0]), html)


def change(app: Sphinx, page: str, template: str, context: dict[str, Any], doctree: Any) -> None:
    """Change a page before it is written."""
    if "body" in context:
        context["body"] = breakable(context["body"])


def setup(app: Sphinx) -> dict[str, bool]:
    """Take part in the writing of every page."""
    app.connect("html-page-context", change)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
