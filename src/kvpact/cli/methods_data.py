"""What is known of the methods: options, papers, bits, cautions."""

from __future__ import annotations

import dataclasses
import inspect
import sys
from typing import Any

import torch

from kvpact.methods import bytes_per_slot
from kvpact.methods.cautions import cautions
from kvpact.registry import Alias, Foreign, find_method, known_names
from kvpact.spec import Spec, option_types, parse_spec

WIDTHS = (64, 128)


def all_methods() -> dict[str, list[dict[str, Any]]]:
    """Return ``methods``, ``aliases``, and as ``broken`` those that can't be loaded."""
    found: dict[str, list[dict[str, Any]]] = {"methods": [], "aliases": [], "broken": []}
    for name in known_names():
        try:
            entry = find_method(name)
            if isinstance(entry, Alias):
                found["aliases"].append({"name": name, "spec": entry.spec})
            elif not isinstance(entry, Foreign):
                found["methods"].append({"name": name, **_method(entry)})
        except Exception as error:  # a plug-in may fail in any way; the others are there still
            found["broken"].append({"name": name, "error": f"{type(error).__name__}: {error}"})
    return found


def one_method(name: str) -> dict[str, Any]:
    """Return what is known of a method, an alias or a whole spec.

    Raises
    ------
    SpecError
        There is none.
    """
    spec = parse_spec(name)
    entry = find_method(name) if name in known_names() else None
    sides = {"k": spec.key} if spec.key == spec.value else {"k": spec.key, "v": spec.value}
    return {
        "spec": str(spec),
        "alias_of": entry.spec if isinstance(entry, Alias) else None,
        "methods": [
            {"side": side if len(sides) > 1 else "both", **_side(m)} for side, m in sides.items()
        ],
        "cautions": list(cautions(spec)),
        "slot_bits": _slot_bits(spec),
    }


def _method(cls: Any) -> dict[str, Any]:
    options = {field.name: field.default for field in dataclasses.fields(cls)}
    summary = inspect.cleandoc(cls.__doc__ or "").partition("\n")[0]
    bits = _slot_bits(Spec(cls(), cls()))
    paper = getattr(cls, "paper", "") or None
    return {"summary": summary, "options": options, "paper": paper, "slot_bits": bits}


def slot_bits(key: Any, value: Any, dim: int) -> tuple[float, float]:
    """Return the bits of packed codes and side information per value of K and of V (fp16 input).

    Parameters
    ----------
    key, value : Method
        For K and for V.
    dim : int
        Width of both.
    """
    codecs = (key.key_codec(dim, torch.float16), value.value_codec(dim, torch.float16))
    k, v = (8 * bytes_per_slot(codec) / dim for codec in codecs)
    return k, v


def option_text(value: object) -> str:
    """Return an option's value as a spec has it."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def _slot_bits(spec: Spec) -> list[dict[str, Any]]:
    bits = [(dim, slot_bits(spec.key, spec.value, dim)) for dim in WIDTHS]
    return [{"width": dim, "k": k, "v": v} for dim, (k, v) in bits]


def _side(method: Any) -> dict[str, Any]:
    """Return the text and the options of a method."""
    cls: Any = type(method)
    types, told = option_types(cls), meanings(cls)
    options = []
    for option in dataclasses.fields(method):
        kind, meaning = told.get(option.name, (types[option.name].__name__, ""))
        options.append(
            {
                "name": option.name,
                "type": kind,
                "default": option.default,
                "value": getattr(method, option.name),
                "meaning": meaning,
            }
        )
    text = inspect.cleandoc(sys.modules[cls.__module__].__doc__ or cls.__doc__ or "")
    return {"name": cls.name, "text": text, "options": options}


def meanings(cls: type) -> dict[str, tuple[str, str]]:
    """Return type and meaning of each option out of the numpydoc of a class and its bases."""
    found: dict[str, tuple[str, str]] = {}
    for base in cls.__mro__:
        body = inspect.cleandoc(base.__doc__ or "").partition("Parameters\n----------\n")[2]
        name = ""
        for line in body.splitlines():
            head, colon, kind = line.partition(" : ")
            if colon and not line.startswith(" "):
                name = head if head not in found else ""
                if name:
                    found[name] = (kind, "")
            elif line.startswith("    ") and name:
                kind, meaning = found[name]
                found[name] = (kind, f"{meaning} {line.strip()}".strip())
            elif line.strip():
                break
    return found
