"""The version stands in one place, `src/kvpact/__init__.py`."""

import re
import tomllib
from importlib.metadata import version
from pathlib import Path

import kvpact

ROOT = Path(__file__).parents[2]


def test_the_build_reads_the_version_from_the_package():
    read = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
    assert read["project"]["dynamic"] == ["version"] and "version" not in read["project"]
    provider = read["tool"]["scikit-build"]["metadata"]["version"]
    text = (ROOT / provider["input"]).read_text("utf-8")
    assert re.findall(r'(?m)^__version__ = "(.+)"$', text) == [kvpact.__version__]


def test_what_is_installed_is_of_this_version():
    assert version("kvpact") == kvpact.__version__, "install it again: rm .venv/.installed"


def test_the_changelog_has_a_section_for_it():
    changes = (ROOT / "CHANGELOG.md").read_text("utf-8")
    assert f"\n## [{kvpact.__version__}] - " in changes
