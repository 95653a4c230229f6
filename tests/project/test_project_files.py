"""Files for people who come to the repository: their links, their forms, their version."""

import re
from pathlib import Path

import pytest

import kvpact

ROOT = Path(__file__).parents[2]
TEXTS = [
    *("AGENTS.md", "ARCHITECTURE.md", "CODE_OF_CONDUCT.md", "SECURITY.md"),
    ".github/pull_request_template.md",
    *sorted(str(x.relative_to(ROOT)) for x in (ROOT / "src").rglob("README.md")),
]
FORMS = sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("[0-9]*.yml"))
KINDS = {"markdown", "input", "textarea", "dropdown", "checkboxes"}


def test_the_citation_has_the_version_of_the_package():
    lines = (ROOT / "CITATION.cff").read_text("utf-8").splitlines()
    assert f"version: {kvpact.__version__}" in lines and "license: Apache-2.0" in lines


@pytest.mark.parametrize("name", TEXTS)
def test_links_lead_to_files_of_the_repository(name):
    links = re.findall(r"\]\(([^)#]+)", (ROOT / name).read_text("utf-8"))
    assert [link for link in links if not (ROOT / name).parent.joinpath(link).exists()] == []


def test_paths_that_agents_are_told_of_are_there():
    table = re.findall(r"\| `([^|]+)` \|$", (ROOT / "AGENTS.md").read_text("utf-8"), re.M)
    paths = [path for row in table for path in row.split("`, `")]
    assert "src/kvpact/methods/" in paths
    inside = [ROOT, ROOT / "src" / "kvpact"]
    assert [path for path in paths if not any((place / path).is_dir() for place in inside)] == []


@pytest.mark.parametrize("path", FORMS, ids=lambda path: path.stem)
def test_forms_of_issues_are_as_their_host_reads_them(path):
    yaml = pytest.importorskip("yaml")
    form = yaml.safe_load(path.read_text("utf-8"))
    assert form["name"] and form["description"]
    fields = [field for field in form["body"] if field["type"] != "markdown"]
    assert {field["type"] for field in form["body"]} <= KINDS
    assert all(field["attributes"]["label"] for field in fields)
    names = [field["id"] for field in fields]
    assert len(set(names)) == len(names) >= 3


def test_who_reports_a_defect_is_asked_what_runs_there():
    asked = [path.name for path in FORMS if "kvpact doctor" in path.read_text("utf-8")]
    assert asked == ["1_bug.yml", "2_quality.yml"]
