"""A notebook as a page of the site: texts as they are, code and what it printed, pictures."""

import json

from doc_snippets import ROOT
from kvpact_site.notebooks import markdown
from kvpact_site.repository import DOCS, PAGES

NOTEBOOK = {
    "cells": [
        {"cell_type": "markdown", "source": ["# Title\n", "\n", "Text."]},
        {
            "cell_type": "code",
            "source": ["a = 1\n", "print(a)"],
            "metadata": {"alt": "a line"},
            "outputs": [
                {"output_type": "stream", "name": "stdout", "text": ["1\n"]},
                {"output_type": "stream", "name": "stdout", "text": "2\n"},
                {"output_type": "display_data", "data": {"image/png": "AB\nCD\n"}},
            ],
        },
        {"cell_type": "code", "source": "b = 2", "metadata": {}, "outputs": []},
    ]
}


def test_the_cells_follow_one_another(tmp_path):
    path = tmp_path / "one.ipynb"
    path.write_text(json.dumps(NOTEBOOK))
    assert markdown(path).split("\n\n") == [
        "# Title",
        "Text.",
        "```python\na = 1\nprint(a)\n```",
        "```text\n1\n2\n```",
        "![a line](data:image/png;base64,ABCD)",
        "```python\nb = 2\n```",
        "The notebook: {download}`one.ipynb </../examples/notebooks/one.ipynb>`.\n",
    ]


def test_every_notebook_has_a_page():
    there = {str(path.relative_to(ROOT)) for path in ROOT.glob("examples/notebooks/*.ipynb")}
    assert {name for name in PAGES if name.endswith(".ipynb")} == there
    for name, page in PAGES.items():
        if page != "index.md":
            assert (DOCS / page).read_text("utf-8").strip() == f"{{repository}} {name}"
