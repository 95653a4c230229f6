"""The README in a wheel leads to the repository, wherever it is shown."""

import re
import tomllib
import zipfile
from pathlib import Path

import pytest
from wheel_page import prepare, problems, published

ROOT = Path(__file__).parents[2]
REPOSITORY = "https://example.org/someone/kvpact"
AT = f"{REPOSITORY}/blob/v1.2"


@pytest.mark.parametrize(("text", "made"), [
    ("[a](docs/a.md#b)", f"[a]({AT}/docs/a.md#b)"), ("[a](#b)", f"[a]({AT}/README.md#b)"),
    ("[a](https://example.org/a)", "[a](https://example.org/a)"),
    ('<img src="docs/a.svg">', f'<img src="{REPOSITORY}/raw/v1.2/docs/a.svg">'),
    ("`[a](b)`", "`[a](b)`"), ("```\n[a](b)\n```", "```\n[a](b)\n```"),
])  # fmt: skip
def test_links_lead_to_the_tag(text, made):
    assert published(text, REPOSITORY, "1.2") == made


@pytest.fixture
def source(tmp_path):
    for name in ("README.md", "pyproject.toml", "src/kvpact/__init__.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes((ROOT / name).read_bytes())
    return tmp_path


def wheel(source, urls=""):
    path = source / "kvpact-0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as made:
        text = (source / "README.md").read_text("utf-8")
        made.writestr("kvpact-0.dist-info/METADATA", f"Name: kvpact\n{urls}\n{text}".encode())
    return path


def test_the_readme_as_it_is_would_lead_nowhere(source):
    found = problems(wheel(source))
    assert "docs/quality.md is no absolute address" in found
    assert "docs/_static/overview-light.svg is no absolute address" in found
    assert found[-1] == "the metadata has no Project-URL"


def test_the_prepared_page_has_no_problem_and_only_files_that_are_there(source):
    prepare(source, REPOSITORY + "/")
    project = tomllib.loads((source / "pyproject.toml").read_text("utf-8"))["project"]
    assert project["urls"]["Repository"] == REPOSITORY
    assert problems(wheel(source, f"Project-URL: Repository, {REPOSITORY}\n")) == []
    text = (source / "README.md").read_text("utf-8")
    paths = re.findall(rf"{REPOSITORY}/(?:blob|raw)/v[^/]+/([^)#\"\s]+)", text)
    assert len(paths) > 20 and all((ROOT / path).exists() for path in paths)


def test_an_address_that_is_none_is_refused(source):
    with pytest.raises(SystemExit, match="should begin with https://"):
        prepare(source, "someone/kvpact")
