"""The notebooks: short, drawn, and what is committed under their cells is what they compute."""

import json
import re
from pathlib import Path

import pytest
from by_path import module_at

from kvpact import registry
from kvpact.testing import MethodContract

FOLDER = Path(__file__).parents[2] / "examples" / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
NUMBER = re.compile(r"\d[\d,]*(?:\.\d+)?(?:e-?\d+)?")
WITHIN = 0.1  # of a figure with a decimal point: processors round differently


def cells(path, kind):
    found = json.loads(path.read_text("utf-8"))["cells"]
    return [cell for cell in found if cell["cell_type"] == kind]


def source(cell):
    return "".join(cell["source"])


def printed(outputs):
    """Return all that is printed under a cell; how it is cut into pieces is of no account."""
    return "".join("".join(x["text"]) for x in outputs if x["output_type"] == "stream")


def pictures(outputs):
    return [x for x in outputs if "image/png" in x.get("data", ())]


def unlike(committed, fresh):
    """Return what differs: words and whole numbers have to agree, other numbers within 10 %."""
    if NUMBER.sub("#", committed) != NUMBER.sub("#", fresh):
        return f"{committed!r} became {fresh!r}"
    for a, b in zip(NUMBER.findall(committed), NUMBER.findall(fresh), strict=True):
        first, second = (float(x.replace(",", "")) for x in (a, b))
        near = abs(first - second) <= WITHIN * abs(first) if re.search(r"[.e]", a) else a == b
        if not near:
            return f"{a} became {b} in {committed!r}"
    return ""


def test_there_are_three():
    assert [path.stem[0] for path in NOTEBOOKS] == ["1", "2", "3"]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_read_in_five_minutes(path):
    words = sum(len(source(cell).split()) for cell in cells(path, "markdown"))
    lines = sum(len(source(cell).splitlines()) for cell in cells(path, "code"))
    assert words < 600 and lines < 130
    assert path.stat().st_size < 50_000


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_what_is_committed_is_one_execution_from_the_top(path):
    code = cells(path, "code")
    assert [cell["execution_count"] for cell in code] == list(range(1, len(code) + 1))
    outputs = [output for cell in code for output in cell["outputs"]]
    assert {x["output_type"] for x in outputs} <= {"stream", "display_data"}, "an error"
    assert {x.get("name", "stdout") for x in outputs} == {"stdout"}, "a warning"
    drawing = [cell for cell in code if pictures(cell["outputs"])]
    assert drawing and all(cell["metadata"]["alt"] for cell in drawing)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_links_of_a_notebook_lead_to_files(path):
    text = "\n".join(source(cell) for cell in cells(path, "markdown"))
    links = re.findall(r"\]\((?!https:)([^)#]+)", text)
    assert links and [link for link in links if not (FOLDER / link).exists()] == []


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_computes_what_is_committed(path):
    pytest.importorskip("nbclient")
    computed = module_at(FOLDER / "execute.py").executed(path)
    fresh = [cell for cell in computed.cells if cell.cell_type == "code"]
    for old, new in zip(cells(path, "code"), fresh, strict=True):
        assert len(pictures(old["outputs"])) == len(pictures(new.outputs))
        if "varies" in old["metadata"].get("tags", ()):  # texts, who computed: another machine's
            assert printed(new.outputs)
        else:
            assert unlike(printed(old["outputs"]), printed(new.outputs)) == ""


@pytest.fixture(scope="module")
def quartet():
    code = cells(NOTEBOOKS[1], "code")
    names = {"__name__": "quartet"}
    for cell in (code[0], code[-1]):  # the method; its packed format
        exec(compile(source(cell), "notebook", "exec"), names)
    yield
    registry._registered.pop("quartet")


@pytest.mark.slow
@pytest.mark.usefixtures("quartet")
class TestTheMethodOfTheNotebook(MethodContract):
    spec = "quartet:rotate=true"
