"""The reference of specs: options of every method, and the bits of common specs."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from kvpact.cli.methods import meanings, option_text, slot_bits
from kvpact.spec import option_types, parse_spec
from kvpact_pages.cards import methods, summary
from kvpact_pages.results import code, table

_COMMON = ("sinks", "window")


def options() -> str:
    """Return all options of all methods but those that every method has."""
    return "\n\n".join(_method(name, method) for name, method in methods().items())


def _method(name: str, method: Any) -> str:
    told, kinds = meanings(method), option_types(method)
    lines = [f"### {code(name)}", "", f"{summary(method)} [Card](methods/{name}.md)", ""]
    for field in fields(method):
        if field.name not in _COMMON:
            kind, meaning = told.get(field.name, (kinds[field.name].__name__, ""))
            only = " K only." if field.name in method.key_only and "K only" not in meaning else ""
            lines.append(
                f"- {code(f'{field.name}={option_text(field.default)}')}, {kind}: {meaning}{only}"
            )
    return "\n".join(lines)


def bits() -> str:
    """Return the bits of the specs that methods name as examples, by width."""
    rows = []
    for method in methods().values():
        for text in method.examples:
            spec = parse_spec(text)
            rows.append([code(text), *(_sides(spec, dim) for dim in (64, 128))])
    return table(("spec", "width 64", "width 128"), rows, left=1)


def _sides(spec: Any, dim: int) -> str:
    key, value = slot_bits(spec.key, spec.value, dim)
    return f"{key:.4g}" if key == value else f"{key:.4g} / {value:.4g}"


BLOCKS = {"specs-options": options, "specs-bits": bits}
