"""Methods by name: registered in the process, or found through entry points when first asked for.

A distribution offers a method through the entry-point group ``kvpact.methods``; the package's own
methods come the same way. Nothing is imported before its name is used.
"""

from __future__ import annotations

import re
import threading
from dataclasses import dataclass, is_dataclass
from difflib import get_close_matches
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from kvpact.errors import RegistrationError, SpecError

ENTRY_POINT_GROUP = "kvpact.methods"


@dataclass(frozen=True)
class Alias:
    """A name used elsewhere that expands to exactly what it means there."""

    name: str
    spec: str


@dataclass(frozen=True)
class Foreign:
    """A name used elsewhere for something that kvpact has no equal of; refused."""

    name: str
    nearest: str
    difference: str


_lock = threading.Lock()
_registered: dict[str, Any] = {}


@cache  # looking through all that is installed takes 20 ms
def _entry_points() -> dict[str, list[EntryPoint]]:
    found: dict[str, list[EntryPoint]] = {}
    for point in entry_points(group=ENTRY_POINT_GROUP):
        found.setdefault(point.name, []).append(point)
    return found


def _checked(name: str, entry: Any) -> Any:
    if isinstance(entry, Alias | Foreign):
        return entry
    missing = [a for a in ("name", "version", "key_codec", "value_codec") if not hasattr(entry, a)]
    if not isinstance(entry, type) or not is_dataclass(entry):
        missing.append("being a dataclass")
    if missing:
        raise RegistrationError(
            f"{name!r}: a method is a frozen dataclass derived from kvpact.methods.Method; "
            f"{entry!r} lacks {', '.join(missing)}"
        )
    if entry.name != name:
        raise RegistrationError(f"the class registered as {name!r} calls itself {entry.name!r}")
    if not isinstance(name, str) or not re.fullmatch(r"\w[\w.-]*", name):
        raise RegistrationError(
            f"a method's name has letters, digits, '_', '-' and '.', not {name!r}"
        )
    return entry


def register_method(method: type) -> type:
    """Register a method class under its `name`; usable as a decorator.

    Parameters
    ----------
    method : type
        A frozen dataclass derived from `kvpact.methods.Method`; returned unchanged.

    Raises
    ------
    RegistrationError
        The name is taken by another class, or the class is no method.
    """
    name = getattr(method, "name", "")
    _checked(name, method)
    with _lock:
        if name in _entry_points() or _registered.get(name) not in (None, method):
            raise RegistrationError(f"a method named {name!r} is there already; choose another")
        _registered[name] = method
    return method


def find_method(name: str) -> Any:
    """Return the method class, `Alias` or `Foreign` name of that name. Raises `SpecError`."""
    with _lock:
        if name in _registered:
            return _registered[name]
    points = _entry_points().get(name)
    if points is None:
        near = get_close_matches(name.lower(), known_names(), n=1, cutoff=0.65)
        hint = f"; did you mean {near[0]!r}?" if near else "."
        bits = (re.findall("[1-6]", name) or [4])[0]
        raise SpecError(
            f"unknown method {name!r}{hint} Known: int, none, trellis, turboquant; more: kvpact "
            f"methods. For {bits} bits write: 'trellis:bits={bits}'"
        )
    offers = sorted({point.value for point in points})
    if len(offers) > 1:
        raise RegistrationError(
            f"method {name!r} is offered by {' and '.join(offers)}; uninstall one"
        )
    try:
        entry = points[0].load()
    except Exception as error:
        raise RegistrationError(
            f"method {name!r} can't be loaded ({offers[0]}): {error}"
        ) from error
    return _checked(name, entry)


def known_names() -> list[str]:
    """Return the names of all methods and aliases, sorted; nothing is imported."""
    with _lock:
        return sorted({*_registered, *_entry_points()})


def list_methods() -> dict[str, Any]:
    """Return every method class and `Alias` by name (foreign names left out)."""
    found = {name: find_method(name) for name in known_names()}
    return {name: entry for name, entry in found.items() if not isinstance(entry, Foreign)}
