"""Packages that are called (``kvpact.evaluate(…)``), and names that are not there."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping
from functools import wraps
from types import ModuleType
from typing import Any, NamedTuple, TypeVar

from kvpact.errors import KVPactError

T = TypeVar("T")


class CallError(KVPactError, TypeError):
    """A class was called with other arguments than it has."""


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


def tells_names(meant: Mapping[str, str], call: str = "") -> Callable[[type[T]], type[T]]:
    """Let a class say what to write for names, or arguments of a `call`, that it has not."""

    def told(kind: type[T]) -> type[T]:
        made: Any = kind.__init__

        @wraps(made)
        def init(self: T, *given: Any, **named: Any) -> None:
            try:
                made(self, *given, **named)
            except TypeError as error:
                if not str(error).startswith(f"{kind.__name__}.__init__() "):
                    raise  # from within
                raise CallError(f"{error}; write: {call}") from None

        if call:
            kind.__init__ = init  # type: ignore
        for name, line in meant.items():
            setattr(kind, name, _Absent(name, line))
        kind.__dir__ = lambda self: {*object.__dir__(self)} - meant.keys()  # type: ignore
        return kind

    return told
