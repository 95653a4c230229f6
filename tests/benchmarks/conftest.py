"""Imports of what `benchmarks` has."""

import importlib
from pathlib import Path

import pytest


@pytest.fixture
def module(monkeypatch):
    """Import a module of the benchmarks."""
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "benchmarks")
    return importlib.import_module
