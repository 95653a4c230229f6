"""Callable packages: ``kvpact.evaluate(…)`` as well as the names in ``kvpact.evaluate``."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any


def let_call(package: str, function: Callable[..., Any]) -> None:
    """Let calls of an imported package, by its name, be calls of a function."""
    told = property(lambda package: inspect.signature(function))  # that of a method lacks its first
    body = {"__call__": staticmethod(function), "__signature__": told}
    kind = type("CallablePackage", (ModuleType,), body)
    sys.modules[package].__class__ = kind
