"""The table of specs: every registered method is in it, and what it says of specs is true."""

import pytest

import kvpact
from kvpact.registry import Alias
from kvpact.testing import example_specs, method_specs, variant_specs

METHODS = [name for name, entry in kvpact.list_methods().items() if not isinstance(entry, Alias)]


@pytest.mark.parametrize("name", METHODS)
def test_every_method_is_in_the_table_by_its_own_examples(name):
    first = [spec for spec in method_specs() if kvpact.parse_spec(spec).key.name == name]
    assert len(first) == 1
    assert first[0] in example_specs()
    assert kvpact.list_methods()[name].examples, "a method of this package says its errors"


def test_kinds_part_the_table():
    for table in (method_specs, example_specs, variant_specs):
        learn, code = set(table(fitted=True)), set(table(fitted=False))
        assert learn | code == set(table()) and not learn & code
    assert "kivi:bits=2" in method_specs(grouped=True)
    assert "fp8" in method_specs(grouped=False)
    assert "vq:codebook_size=16" in method_specs(fitted=True)
