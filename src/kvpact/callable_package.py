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
F = TypeVar("F", bound=Callable[..., Any])


class CallError(KVPactError, TypeError):
    """A class, a function or a package was called with other arguments than it has."""


def let_call(package: str, function: Callable[..., Any]) -> None:
    """Let calls of an imported package, by its name, be calls of a function."""
    own = inspect.signature(function)
    by_name = {
        name: f"{name}=..." for name, x in own.parameters.items() if x.kind is x.KEYWORD_ONLY
    }
    line = ", ".join(by_name.get(name, name) for name in own.parameters if name != "options")

    def call(*given: Any, **named: Any) -> Any:
        try:
            own.bind(*given, **named)
        except TypeError as error:
            raise CallError(f"{error}; write: {package}({line})") from None
        return function(*given, **named)

    body = {"__call__": staticmethod(call), "__signature__": property(lambda package: own)}
    kind = type("CallablePackage", (ModuleType,), body)
    sys.modules[package].__class__ = kind


class _Absent(NamedTuple):  # with a `__getattr__`, every attribute would be read more slowly
    name: str
    line: str

    def __get__(self, owner: object, kind: type) -> Any:
        raise AttributeError(f"{kind.__name__} has no {self.name!r}; write: {self.line}")


def tells_call(line: str) -> Callable[[F], F]:
    """Let a function say what to write where its arguments do not fit."""

    def changed(function: F) -> F:
        @wraps(function)
        def call(*given: Any, **named: Any) -> Any:
            try:
                return function(*given, **named)
            except TypeError as error:
                if not str(error).startswith(f"{function.__qualname__}() "):
                    raise  # from within
                raise CallError(f"{error}; write: {line}") from None

        return call  # type: ignore[return-value]

    return changed


def tells_names(meant: Mapping[str, str], call: str = "") -> Callable[[type[T]], type[T]]:
    """Let a class say what to write for names, or arguments of a `call`, that it has not."""

    def changed(kind: type[T]) -> type[T]:
        if call:
            kind.__init__ = tells_call(call)(kind.__init__)  # type: ignore[method-assign]
        for name, line in meant.items():
            setattr(kind, name, _Absent(name, line))
        kind.__dir__ = lambda self: {*object.__dir__(self)} - meant.keys()  # type: ignore[method-assign]
        return kind

    return changed
