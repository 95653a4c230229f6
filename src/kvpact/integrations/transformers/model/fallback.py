"""Warnings of slower ways, once per model, at the user's own line of code."""

import sys
import warnings
from typing import Any
from weakref import finalize

_said: set[tuple[str, int]] = set()
_BETWEEN = {"accelerate", "kvpact", "peft", "torch", "transformers"}  # a user's line and warnings


class FallbackWarning(UserWarning):
    """Something takes the slower way; the results are right."""


def say_once(key: str, message: str, owner: Any = None) -> None:
    """Warn with a `FallbackWarning`, once per `key` and model, which `owner` has the config of."""
    owner = getattr(owner, "config", owner)
    entry = key, id(owner)
    if entry not in _said:
        _said.add(entry)
        if owner is not None:
            finalize(owner, _said.discard, entry).atexit = False
        warn(message)


def warn(message: str) -> None:
    """Warn with a `FallbackWarning` at the line that called into kvpact, or into transformers."""
    frame, level = sys._getframe(1), 2
    while frame.f_back and frame.f_globals.get("__name__", "").partition(".")[0] in _BETWEEN:
        frame, level = frame.f_back, level + 1
    warnings.warn(message, FallbackWarning, stacklevel=level)
