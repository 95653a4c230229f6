"""The directive ``{commands}``: every command of `kvpact`, as typer documents it."""

from __future__ import annotations

import re
from typing import Any

import typer
from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective
from typer.cli import get_docs_for_click

from kvpact.cli.app import Deferred, app

_EXAMPLES = re.compile(r"^Examples?:\n((?:  .*\n?)+)", re.MULTILINE)


def reference() -> str:
    """Return the Markdown of all commands, below headings of the third level."""
    root = _loaded(typer.main.get_command(app))
    text = get_docs_for_click(obj=root, ctx=typer.Context(root), name="kvpact")
    text = re.sub(r"^#{2,3} ", "\n### ", text[text.index("\n## ") :], flags=re.MULTILINE)
    return _EXAMPLES.sub(lambda found: _console(found[1]), text)


def _console(lines: str) -> str:
    return "```console\n" + re.sub("^  ", "$ ", lines, flags=re.MULTILINE) + "```\n"


def _loaded(command: Any) -> Any:
    """Return a group whose commands know their options."""
    for name, one in getattr(command, "commands", {}).items():
        command.commands[name] = one.load() if isinstance(one, Deferred) else _loaded(one)
    return command


class Commands(SphinxDirective):
    """Generated from the typer application, so it can't differ from ``--help``."""

    def run(self) -> list[nodes.Node]:
        """Return a section for every command."""
        return self.parse_text_to_nodes(reference(), allow_section_headings=True)


def setup(site: Sphinx) -> dict[str, bool]:
    """Register the directive."""
    site.add_directive("commands", Commands)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
