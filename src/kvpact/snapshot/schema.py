"""What the values of a manifest may be, written as a table and checked before anything is used."""

from __future__ import annotations

import re
from typing import Any

from kvpact.errors import FormatError

SIZE = range(1 << 40)
ANY = range(-(1 << 40), 1 << 40)
COUNT = range(1, 1 << 40)


def need(good: bool, what: str) -> None:
    """Raise `FormatError` unless all is well."""
    if not good:
        raise FormatError(f"the manifest is damaged: {what}")


def check(value: Any, wanted: Any, what: str) -> None:
    """Raise `FormatError` unless a value is as wanted.

    `wanted`: ``{key: wanted}`` for an object with exactly these keys, ``[wanted]`` for a list, a
    range for a whole number, a pattern or a set for a text, a type for anything of it;
    ``(wanted,)`` where null will do, too.
    """
    if isinstance(wanted, dict):
        need(isinstance(value, dict) and value.keys() == wanted.keys(), what)
        for name, inner in wanted.items():
            check(value[name], inner, f"{what}.{name}")
    elif isinstance(wanted, list):
        need(isinstance(value, list), what)
        for index, item in enumerate(value):
            check(item, wanted[0], f"{what}[{index}]")
    elif isinstance(wanted, tuple):
        if value is not None:
            check(value, wanted[0], what)
    elif isinstance(wanted, range):
        need(type(value) is int and value in wanted, what)
    elif isinstance(wanted, re.Pattern):
        need(isinstance(value, str) and wanted.fullmatch(value) is not None, what)
    elif isinstance(wanted, frozenset):
        need(isinstance(value, str) and value in wanted, what)
    else:
        need(isinstance(value, wanted), what)
