"""Comparisons of native kernels at every SIMD level, each in a process of its own."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kvpact.kernels.cpu import LEVELS, library
from kvpact.kernels.cpu.library import _load

_SCRIPTS = Path(__file__).parent.parent / "kernels"


def levels() -> list[Any]:
    """Return all SIMD levels for pytest; all but the one that computes here are marked slow."""
    loaded = _load()
    best = None if isinstance(loaded, str) else loaded.level
    return [
        pytest.param(name, marks=() if name == best else pytest.mark.slow, id=name)
        for name in LEVELS
    ]


def at_level(level: str, script: str) -> dict[str, Any]:
    """Run a script of `tests/kernels` at a SIMD level and return what it tells, a line of JSON.

    The test is skipped where there is no such level.
    """
    if level not in library().levels:
        pytest.skip(f"{level}: not on this processor, or above KVPACT_SIMD")
    run = subprocess.run(
        [sys.executable, str(_SCRIPTS / script)],
        env={**os.environ, "KVPACT_SIMD": level},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    told: dict[str, Any] = json.loads(run.stdout.splitlines()[-1])
    assert told["level"] == level
    return told
