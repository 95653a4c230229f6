"""The tree of errors, as the module's docstring draws it."""

import re

from kvpact import errors

LINE = re.compile(r"^ {4}([|` -]*)(\w[\w, ]*?)(?: +\((\w+)\))?$", re.MULTILINE)


def test_the_tree_drawn_is_that_of_the_classes():
    drawn, above = {}, {}
    for bars, names, base in LINE.findall(errors.__doc__):
        for name in names.split(", "):
            drawn[name] = {base or None, above.get(len(bars) - 3)} - {None}
            above[len(bars)] = name
    classes = [x for x in vars(errors).values() if isinstance(x, type)]
    bases = {x.__name__: {base.__name__ for base in x.__bases__} for x in classes}
    assert bases.pop("KVPactError") == {"Exception"}
    assert drawn == bases | {"KVPactError": set()}
