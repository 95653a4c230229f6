"""The wings of ARCHITECTURE.md: which tests `make test WING=…` runs."""

from pathlib import Path

import pytest
from wings import arguments, wings

ROOT = Path(__file__).parents[2]
NAMES = [*wings(ROOT), "project"]


def files(wing):
    """Return the test files that pytest collects with a wing's arguments."""
    words = arguments(ROOT, wing)
    without = [ROOT / word.removeprefix("--ignore=") for word in words if "=" in word]
    for path in (ROOT / word for word in words if "=" not in word):
        for file in path.rglob("test_*.py") if path.is_dir() else [path]:
            if not any(file.is_relative_to(other) for other in without):
                yield file


def test_each_test_file_belongs_to_one_wing():
    found = [file for name in NAMES for file in files(name)]
    assert sorted(found) == sorted((ROOT / "tests").rglob("test_*.py"))


def test_parts_of_a_package_that_are_another_wing_are_left_out():
    assert "--ignore=tests/kernels/triton" in arguments(ROOT, "core")
    assert arguments(ROOT, "gpu") == ["tests/kernels/triton"]


def test_an_unknown_wing_is_named_with_those_that_are():
    with pytest.raises(SystemExit, match="no wing is called 'cor'; there are core, gpu, keep"):
        arguments(ROOT, "cor")
