"""What a reader sees: lines that fit, pages that are near, pictures whose labels can be read."""

import json
import re
from itertools import combinations
from xml.etree import ElementTree

import pytest
from doc_snippets import PAGES, ROOT, blocks, name_of

DOCS = ROOT / "docs"
SVG = "{http://www.w3.org/2000/svg}"
# kvpact demo draws its own, and its own boxes.
PICTURES = [*(DOCS / "pictures").glob("*.svg"), *(DOCS / "_static").glob("overview-*.svg")]
TUTORIAL = ROOT / "examples" / "notebooks" / "1_try_it_on_your_model.ipynb"
PROGRAMS = ("python", "console", "bash", "sh", "")
"""Languages of what a reader types; what is printed (``text``) may be wider."""
TOCTREE = re.compile(r"^```\{toctree\}\n(?::.*\n)*\n((?:[\w/-]+\n)+)```", re.MULTILINE)


def test_programs_fit_into_eighty_columns():
    wide = []
    for page in PAGES:
        for block in blocks(page):
            lines = block.code.splitlines() if block.language in PROGRAMS else ()
            wide += [f"{name_of(page)}: {line}" for line in lines if len(line) > 80]
    for cell in json.loads(TUTORIAL.read_text("utf-8"))["cells"]:
        if cell["cell_type"] == "code":
            lines = "".join(cell["source"]).splitlines()
            wide += [f"{TUTORIAL.name}: {line}" for line in lines if len(line) > 80]
    assert not wide


def linked(name):
    """Return the pages that a page's trees of contents name."""
    path = DOCS / f"{name}.md"
    if not path.exists():  # a notebook
        return set()
    entries = " ".join(TOCTREE.findall(path.read_text("utf-8"))).split()
    return {(path.parent / entry).relative_to(DOCS).as_posix() for entry in entries}


def test_every_page_is_within_two_clicks_of_the_front_page():
    near = linked("index")
    near |= {page for one in near for page in linked(one)}
    every = {path.relative_to(DOCS).with_suffix("").as_posix() for path in DOCS.rglob("*.md")}
    assert len(every) > 30 and every <= near | {"index"}


def boxes(path):
    """Return the size of a picture, and its texts with the places that they take."""
    pytest.importorskip("matplotlib")
    from matplotlib.textpath import TextPath

    root = ElementTree.parse(path).getroot()
    found = []
    for text in root.iter(f"{SVG}text"):
        style = dict(re.findall(r"([\w-]+): ([^;]+)", text.get("style")))
        size = float(style["font-size"].removesuffix("px"))
        kind, *numbers = re.findall(r"[a-z]+|-?[\d.]+", text.get("transform"))
        x, y = map(float, numbers[-2:])
        outline = TextPath((0, 0), text.text, size=size).get_extents()
        share = {"middle": 0.5, "end": 1.0}.get(style.get("text-anchor"), 0.0)
        left = -share * outline.width
        turned = kind == "rotate" and abs(float(numbers[0])) == 90
        assert turned or kind == "translate" or float(numbers[0]) == 0
        box = (x + left, y - outline.y1, x + left + outline.width, y - outline.y0)
        if turned:  # upwards
            box = (x - outline.y1, y - left - outline.width, x - outline.y0, y - left)
        found.append((text.text, box))
    return [float(side) for side in root.get("viewBox").split()[2:]], found


@pytest.mark.parametrize("path", PICTURES, ids=lambda path: path.name)
def test_labels_are_inside_of_the_picture_and_not_on_each_other(path):
    (width, height), labels = boxes(path)
    assert len(labels) > 5
    for text, (x0, y0, x1, y1) in labels:
        assert x0 >= 0 and y0 >= 0 and x1 <= width and y1 <= height, text
    for (one, a), (other, b) in combinations(labels, 2):
        apart = a[2] <= b[0] or b[2] <= a[0] or a[3] <= b[1] or b[3] <= a[1]
        assert apart, (one, other)
