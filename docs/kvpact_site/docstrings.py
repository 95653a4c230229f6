"""Docstrings as Sphinx reads them: two habits of kvpact's that reStructuredText has no sign for."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # Tests import this where Sphinx is not installed.
    from sphinx.application import Sphinx

_FENCE = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
# Whole pairs are matched, so that what lies between two of them is not taken for one.
_PAIR = re.compile(r"``[^`]+``|`[^`]+`(\w)?")


def translated(text: str) -> str:
    """Return a docstring whose fences are literal blocks, and whose `Spec`s end where they should.

    Parameters
    ----------
    text : str
        A docstring without its indentation.
    """
    text = _FENCE.sub(lambda fence: _block(*fence.groups()), text)
    return _PAIR.sub(lambda pair: _separated(pair[0]) if pair[1] else pair[0], text)


def _separated(text: str) -> str:
    return f"{text[:-1]}\\ {text[-1]}"


def _block(language: str, body: str) -> str:
    lines = "".join(f"   {line}\n" if line else "\n" for line in body.splitlines())
    return f".. code-block:: {language}\n\n{lines}"


def process(app: Sphinx, what: str, name: str, obj: object, options: object, lines: list) -> None:
    """Translate the docstring that autodoc is about to read."""
    lines[:] = translated("\n".join(lines)).split("\n")


def setup(app: Sphinx) -> dict[str, bool]:
    """Take part before napoleon does."""
    app.connect("autodoc-process-docstring", process, priority=400)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
