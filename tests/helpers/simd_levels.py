"""The native kernels at every SIMD level."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import pytest

from kvpact.kernels.cpu import LEVELS
from kvpact.kernels.cpu.library import NativeLibrary, _load


def levels() -> list[Any]:
    """Return all SIMD levels for pytest; all but the one that computes here are marked slow."""
    loaded = _load()
    best = None if isinstance(loaded, str) else loaded.level
    slow = {name: () if name == best else pytest.mark.slow for name in LEVELS}
    return [pytest.param(name, marks=marks, id=name) for name, marks in slow.items()]


each_half = pytest.mark.parametrize("half", (0, pytest.param(1, marks=pytest.mark.slow)))
"""Every second of many cases; the others are slow."""


@contextmanager
def at_level(level: str) -> Iterator[None]:
    """Let the native kernels compute at a SIMD level; the test is skipped where there is none."""
    loaded = _load()
    assert not isinstance(loaded, str)
    if level not in loaded.levels:
        pytest.skip(f"{level}: not on this processor, or above KVPACT_SIMD")
    capped = NativeLibrary(loaded.path, loaded.levels[: loaded.levels.index(level) + 1])
    module = sys.modules["kvpact.kernels.cpu.library"]
    with patch.object(module, "_load", lambda: capped):
        assert module.library().level == level
        yield
