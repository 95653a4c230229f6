"""``--json``: the result of a command as one JSON document on stdout, and nothing else there.

Every document is an object whose ``command`` names the command. Bytes are whole numbers, times
are in seconds, and what is no number (NaN, infinity) is null. The other keys of each document
stand in ``tests/cli/test_json.py``, which checks them.
"""

from __future__ import annotations

import json

import typer

from kvpact.files import json_ready


def print_document(command: str, **fields: object) -> None:
    """Print the document of a command.

    Parameters
    ----------
    command : str
        Its words, without ``kvpact``.
    fields : object
        The other keys: numbers, text, None, and lists and mappings of them.
    """
    document = {"command": command, **fields}
    typer.echo(json.dumps(json_ready(document), indent=2, allow_nan=False, ensure_ascii=False))
