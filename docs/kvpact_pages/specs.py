"""The reference of specs: the bits of common specs."""

from __future__ import annotations

from kvpact.spec import parse_spec
from kvpact_pages.cards import methods, sides
from kvpact_pages.results import code, table


def bits() -> str:
    """Return the bits of the specs that methods name as examples, by width."""
    rows = []
    for method in methods().values():
        for text in method.examples:
            spec = parse_spec(text)
            rows.append([code(text), *(sides(spec.key, spec.value, dim) for dim in (64, 128))])
    return table(("spec", "width 64", "width 128"), rows)


BLOCKS = {"specs-bits": bits}
