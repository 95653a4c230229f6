"""The table of docs/support.md: what can be done with a cache of each structure."""

import json

import pytest
from operations import NAMES, OPERATIONS, PATH, outcome


def test_every_model_and_operation_is_in_the_table_and_nothing_is_wrong():
    found = json.loads(PATH.read_text("utf-8"))
    assert list(found) == NAMES and len(NAMES) >= 37
    assert all(list(outcomes) == list(OPERATIONS) for outcomes in found.values())
    states = {text.partition(": ")[0] for x in found.values() for text in x.values()}
    assert states == {"right", "refused", "-"}


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_the_table_says_what_happens(name):
    found = json.loads(PATH.read_text("utf-8"))[name]
    assert {operation: outcome(name, operation) for operation in OPERATIONS} == found
