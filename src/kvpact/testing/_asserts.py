"""Registration with pytest, before the kit is imported, so that it explains its assertions."""

from pathlib import Path

import pytest

CHECKED = sorted(path.stem for path in Path(__file__).parent.glob("[!_]*.py"))
"""Modules of the kit."""

pytest.register_assert_rewrite(*(f"kvpact.testing.{name}" for name in CHECKED))
