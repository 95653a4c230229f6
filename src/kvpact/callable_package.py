"""Packages that are called (``kvpact.evaluate(…)``), and names that are not there."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping
from functools import wraps
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from kvpact.errors import KVPactError

T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])


class CallError(KVPactError, TypeError):
    """A class, a function or a package was called with other arguments than it has."""


def call_line(name: str, function: Callable[..., Any]) -> str:
    """Return a call of a function as a line, with all of its parameters."""
    own = [x for x in inspect.signature(function).parameters.values() if x.name != "self"]
    words = [x.name + "=..." * (x.kind is x.KEYWORD_ONLY) for x in own if x.name != "options"]
    return f"{name}({', '.join(words)})"


class Told:
    """Names that an object does not have are answered with those that it has."""

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            known = ", ".join(x for x in dir(self) if not x.startswith("_"))
            hint = "" if name.startswith("_") else f"; it has {known}"
            raise AttributeError(f"{type(self).__name__!r} has no attribute {name!r}{hint}")

        def __getitem__(self, name: object) -> Any:
            return getattr(self, str(name))


def let_call(package: str, function: Callable[..., Any]) -> None:
    """Let calls of an imported package, by its name, be calls of a function."""
    own, line = inspect.signature(function), call_line(package, function)
    call = tells_call(line)(function)
    body = {"__call__": staticmethod(call), "__signature__": property(lambda package: own)}
    kind = type("CallablePackage", (ModuleType,), body)
    sys.modules[package].__class__ = kind


class _Absent(NamedTuple):  # with a `__getattr__`, every attribute would be read more slowly
    name: str
    line: str

    def __get__(self, owner: object, kind: type) -> Any:
        raise AttributeError(f"{kind.__name__} has no {self.name!r}; write: {self.line}")


def tells_call(line: str = "") -> Callable[[F], F]:
    """Let a function say what to write where its arguments do not fit."""

    def changed(function: F) -> F:
        @wraps(function)
        def call(*given: Any, **named: Any) -> Any:
            try:
                return function(*given, **named)
            except TypeError:
                wanted = line or call_line(f"kvpact.{function.__name__}", function)
                try:
                    inspect.signature(function).bind(*given, **named)
                except TypeError as error:
                    called = wanted.partition("(")[0]
                    raise CallError(f"{called}: {error}; write: {wanted}") from None
                raise  # from within

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
