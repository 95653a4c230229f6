"""The reference of specs: options of every method, and the bits of common specs."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from kvpact.cli.methods import _meanings, _text, slot_bits
from kvpact.spec import option_types, parse_spec
from kvpact_pages.cards import _escaped, methods
from kvpact_pages.results import code, table

_COMMON = ("sinks", "window")


def options() -> str:
    """Return all options of all methods but those that every method has."""
    rows = []
    for name, method in methods().items():
        told, kinds = _meanings(method), option_types(method)
        for field in fields(method):
            if field.name in _COMMON:
                continue
            kind, meaning = told.get(field.name, (kinds[field.name].__name__, ""))
            if field.name in method.key_only:
                meaning += " K only."
            value = code(f"{field.name}={_text(field.default)}")
            rows.append([f"[`{name}`](methods/{name}.md)", value, *_escaped(kind, meaning)])
    return table(("method", "option and default", "type", "meaning"), rows, left=4)


def bits() -> str:
    """Return the bits of the specs that methods name as examples, by width."""
    rows = []
    for method in methods().values():
        for text in method.examples:
            spec = parse_spec(text)
            rows.append([code(text), *(_sides(spec, dim) for dim in (64, 128))])
    return table(("spec", "width 64", "width 128"), rows, left=1)


def _sides(spec: Any, dim: int) -> str:
    key, value = slot_bits(spec.key, dim)[0], slot_bits(spec.value, dim)[1]
    return f"{key:.4g}" if key == value else f"{key:.4g} / {value:.4g}"


BLOCKS = {"specs-options": options, "specs-bits": bits}
