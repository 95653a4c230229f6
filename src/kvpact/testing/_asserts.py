"""Lets pytest explain the assertions of the kit: it has to be told before they are imported."""

from pathlib import Path

import pytest

CHECKED = sorted(path.stem for path in Path(__file__).parent.glob("[!_]*.py"))
"""Modules of the kit."""

pytest.register_assert_rewrite(*(f"kvpact.testing.{name}" for name in CHECKED))
