"""Packages that are called (``kvpact.evaluate(…)``), and names that are not there."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any, NamedTuple, TypeVar

T = TypeVar("T")


def let_call(package: str, function: Callable[..., Any]) -> None:
    """Let calls of an imported package, by its name, be calls of a function."""
    told = property(lambda package: inspect.signature(function))  # that of a method lacks its first
    body = {"__call__": staticmethod(function), "__signature__": told}
    kind = type("CallablePackage", (ModuleType,), body)
    sys.modules[package].__class__ = kind


class _Absent(NamedTuple):  # with a `__getattr__`, every attribute would be read more slowly
    name: str
    line: str

    def __get__(self, owner: object, kind: type) -> Any:
        raise AttributeError(f"{kind.__name__} has no {self.name!r}; write: {self.line}")


def tells_names(meant: Mapping[str, str]) -> Callable[[type[T]], type[T]]:
    """Let a class say what to write in the place of names that it and its objects don't have."""

    def told(kind: type[T]) -> type[T]:
        for name, line in meant.items():
            setattr(kind, name, _Absent(name, line))
        kind.__dir__ = lambda self: {*object.__dir__(self)} - meant.keys()  # type: ignore
        return kind

    return told
