"""The directive ``{commands}``: every command of `kvpact` with its arguments and options."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import typer
from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

from kvpact.cli.app import Deferred, app
from kvpact.cli.commands import COMMANDS


def lines(command: Any, path: str, depth: int = 3) -> Iterator[str]:
    """Yield the Markdown of a command and of those below it."""
    if isinstance(command, Deferred):
        command = command.load()
    below = getattr(command, "commands", {})
    if not below:
        yield from (f"{'#' * depth} `{path}`", "", inspect.cleandoc(command.help or ""), "")
        examples = COMMANDS[path.removeprefix("kvpact ")].examples
        yield from ("```console", *(f"$ {example}" for example in examples), "```", "")
        for parameter in command.params:
            if parameter.name != "help":
                yield from (_name(parameter), f": {_meaning(parameter)}", "")
    for name, one in sorted(below.items()):
        yield from lines(one, f"{path} {name}", depth)


def _name(parameter: Any) -> str:
    if parameter.param_type_name == "argument":
        return f"`{parameter.name.upper()}`"
    return ", ".join(f"`{option}`" for option in (*parameter.opts, *parameter.secondary_opts))


def _meaning(parameter: Any) -> str:
    said = [(getattr(parameter, "help", None) or "").strip()]
    if parameter.required:
        said.append("Required.")
    elif _tells(default := parameter.default):
        said.append(f"Default: `{default}`.")
    return " ".join(filter(None, said)).replace("<", "&lt;") or "As its name says."


def _tells(default: Any) -> bool:
    """Whether a default is a value that a user could have written."""
    return isinstance(default, str | int | float) and not isinstance(default, bool)


class Commands(SphinxDirective):
    """Generated from the typer application, so it can't differ from ``--help``."""

    def run(self) -> list[nodes.Node]:
        """Return a section for every command."""
        text = "\n".join(lines(typer.main.get_command(app), "kvpact"))
        return self.parse_text_to_nodes(text, allow_section_headings=True)


def setup(site: Sphinx) -> dict[str, bool]:
    """Register the directive."""
    site.add_directive("commands", Commands)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
