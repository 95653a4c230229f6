"""Parts of a page that are written by a program, between two comments."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

_BLOCK = re.compile(
    r"(<!-- generated: (?P<name>[\w-]+) -->\n).*?(<!-- end of (?P=name) -->)", re.DOTALL
)


def filled(page: str, blocks: Mapping[str, Callable[[], str]]) -> str:
    """Return a page with what each of its blocks should hold.

    Parameters
    ----------
    page : str
        Markdown; a block stands between ``<!-- generated: NAME -->`` and ``<!-- end of NAME -->``.
    blocks : mapping
        What makes the text of each block.

    Raises
    ------
    KeyError
        The page has a block that nothing makes.
    """

    def replaced(found: re.Match[str]) -> str:
        text = blocks[found["name"]]().strip("\n")
        return f"{found[1]}\n{text}\n\n{found[3]}"

    return _BLOCK.sub(replaced, page)


def names(page: str) -> list[str]:
    """Return the names of a page's blocks, in their order."""
    return [found["name"] for found in _BLOCK.finditer(page)]
