"""Warnings of slower ways, given once."""

from __future__ import annotations

import warnings

_said: set[str] = set()


class FallbackWarning(UserWarning):
    """Something takes the slower way; the results are right."""


def say_once(key: str, message: str) -> None:
    """Warn with a `FallbackWarning`, once per `key` and process."""
    if key not in _said:
        _said.add(key)
        warnings.warn(message, FallbackWarning, stacklevel=3)
