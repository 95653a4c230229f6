"""What the site lists is all there is: environment variables, extras, public names."""

import importlib
import re
import tomllib

import pytest
from doc_snippets import ROOT
from kvpact_site.breaks import breakable

import kvpact

DOCS = ROOT / "docs"
MODULES = {
    "kvpact": ("caches", "layouts", "specs", "files", "compressor", "quality", "transformers"),
    "kvpact.integrations.transformers": ("transformers",),
    "kvpact.stores": ("stores",),
    "kvpact.errors": ("specs",),
    "kvpact.testing": ("testing",),
}


def test_every_variable_that_is_read_is_listed():
    # Settings of CMake and macros of C++ are no environment variables.
    sources = [path.read_text("utf-8") for path in (ROOT / "src").rglob("*.py")]
    read = {name for text in sources for name in re.findall(r"\bKVPACT_[A-Z0-9_]+\b", text)}
    page = (DOCS / "install.md").read_text("utf-8")
    assert "KVPACT_SIMD" in read
    assert set(re.findall(r"^\| `(KVPACT_\w+)`", page, re.MULTILINE)) == read
    assert {f"KVPACT_{name}" for name in kvpact._VARIABLES} == read | {"KVPACT_GGML_SIMD"}


def test_the_instruction_sets_that_are_listed_are_those_that_there_are():
    from kvpact.kernels.cpu.library import LEVELS

    page = (DOCS / "install.md").read_text("utf-8")
    row = next(line for line in page.splitlines() if line.startswith("| `KVPACT_SIMD`"))
    assert re.findall(r"`(\w+)`", row)[1:] == [*LEVELS]


def test_every_extra_is_listed():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    page = (DOCS / "install.md").read_text("utf-8").partition("## Environment variables")[0]
    rows = re.findall(r"^\| (`.*?) \|", page, re.MULTILINE)
    listed = {name for line in rows for name in re.findall(r"`([\w-]+)`", line)}
    assert listed == set(project["optional-dependencies"])


@pytest.mark.parametrize("module", MODULES)
def test_every_public_name_has_a_place(module):
    loaded = importlib.import_module(module)
    pages = [(DOCS / "api" / f"{page}.md").read_text("utf-8") for page in MODULES[module]]
    told = set(re.findall(r"^\.\. auto(\w+):: (\S+)$", "\n".join(pages), re.MULTILINE))
    if ("module", module) in told:
        return
    names = {name for _, name in told}
    elsewhere = {"errors", "KVPactError", "evaluate", "recommend"}
    homes = {name: {f"{module}.{name}"} for name in set(loaded.__all__) - elsewhere}
    homes |= {x: homes[x] | {f"{kvpact._HOMES[x]}.{x}"} for x in homes.keys() & kvpact._HOMES}
    assert [name for name, known in homes.items() if not known & names] == []
    for name in names:
        owner, _, attribute = name.rpartition(".")
        assert hasattr(importlib.import_module(owner), attribute)


def test_specs_may_be_broken_behind_commas_and_slashes_alone():
    html = '<p>a,b <span class="pre">int:bits=8/kivi:bits=2,sinks=0</span></p>'
    wanted = '<p>a,b <span class="pre">int:bits=8/<wbr>kivi:bits=2,<wbr>sinks=0</span></p>'
    assert breakable(html) == wanted


def test_signatures_may_be_broken_anywhere():
    part = '<span class="n"><span class="pre">a</span></span><span class="w"> </span>'
    html = f'<dt class="sig sig-object py">{part}</dt><span class="pre">b</span>'
    short = '<dt class="sig sig-object py"><span class="n">a</span> </dt>'
    assert breakable(html) == f'{short}<span class="pre">b</span>'
