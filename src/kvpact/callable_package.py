"""Packages that are called (``kvpact.evaluate(…)``), and objects that know what is meant."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import TYPE_CHECKING, Any, ClassVar


def let_call(package: str, function: Callable[..., Any]) -> None:
    """Let calls of an imported package, by its name, be calls of a function."""
    told = property(lambda package: inspect.signature(function))  # that of a method lacks its first
    body = {"__call__": staticmethod(function), "__signature__": told}
    kind = type("CallablePackage", (ModuleType,), body)
    sys.modules[package].__class__ = kind


class TellsNames:
    """Objects that say what to write in the place of names that they don't have: `_meant`."""

    _meant: ClassVar[Mapping[str, str]]

    if not TYPE_CHECKING:  # to a type checker, a misspelt name is an error

        def __getattr__(self, name: str) -> Any:
            if isinstance(found := getattr(type(self), name, None), property):
                return found.__get__(self)  # raises its own error again
            hint = f"; write: {self._meant[name]}" if name in self._meant else ""
            text = f"{type(self).__name__!r} object has no attribute {name!r}{hint}"
            raise AttributeError(text, name=name, obj=self)
