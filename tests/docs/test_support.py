"""The support matrix names tests that are there, and errors that the package raises."""

import re
from itertools import product

from kvpact_pages import support
from kvpact_pages.results import ROOT

import kvpact.errors


def test_tests_that_are_named_are_there():
    assert [test for test in support.tests() if not support.exists(test)] == []


def test_tests_that_are_not_there_are_told_apart():
    assert not support.exists("tests/docs/test_support.py::test_nobody_wrote_this")
    assert not support.exists("tests/docs/test_missing.py::*")


def test_every_answer_is_shown_or_says_that_it_is_not():
    for one, engine in product(support.STRUCTURES, support.ENGINES):
        cell, place = one[engine], (one["name"], engine)
        assert cell["state"] in support.STATES, place
        proven = cell["state"] in support.PROVEN
        assert proven == bool(cell.get("tests") or cell.get("untested")), place


def test_refusals_are_worded_as_they_are_raised():
    files = (ROOT / "src" / "kvpact").rglob("*.py")
    # A message may go on in the next line.
    said = re.sub(r'"\s*\n\s*f?"', "", "\n".join(path.read_text("utf-8") for path in files))
    for one in support.REFUSED:
        assert issubclass(getattr(kvpact.errors, one["error"]), kvpact.errors.KVPactError)
        assert one["says"] in said, one["what"]
