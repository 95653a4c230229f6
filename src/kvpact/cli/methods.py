"""``kvpact methods``: what there is, with which options, at how many bits."""

from __future__ import annotations

import dataclasses
import inspect
import sys
from typing import Any

import torch
import typer

from kvpact.cli.console import output_console, table
from kvpact.methods import bytes_per_slot
from kvpact.methods.cautions import cautions
from kvpact.registry import Alias, Foreign, find_method, known_names
from kvpact.spec import option_types, parse_spec


def methods(
    name: str | None = typer.Argument(None, help="A method, an alias or a whole spec."),
) -> None:
    """List the methods, or explain one."""
    if name is None:
        _overview()
    else:
        _details(name)


def slot_bits(method: Any, dim: int) -> tuple[float, float]:
    """Return the bits of packed codes and side information per value of K and of V (fp16 input)."""
    codecs = (method.key_codec(dim, torch.float16), method.value_codec(dim, torch.float16))
    key, value = (8 * bytes_per_slot(codec) / dim for codec in codecs)
    return key, value


def _overview() -> None:
    columns = ("method", "what it is", "options and defaults", "paper", "bits, D=128", "D=64")
    grid = table(columns, left=4)
    aliases = table(("alias", "stands for"), left=2)
    broken = table(("can't be used", "why"), left=2)
    for name in known_names():
        try:
            entry = find_method(name)
            if isinstance(entry, Alias):
                aliases.add_row(name, entry.spec)
            elif not isinstance(entry, Foreign):
                grid.add_row(name, *_row(entry))
        except Exception as error:  # a plug-in may fail in any way; the others are there still
            broken.add_row(name, f"{type(error).__name__}: {error}")
    console = output_console()
    console.print(grid)
    console.print(
        "Bits per value of the packed slots at the defaults, K and V apart by a slash where they "
        "differ; exact sinks and window come on top. K and V by unlike methods: int:bits=8/kivi. "
        "More: kvpact methods NAME",
        style="dim",
        highlight=False,
    )
    console.print(aliases)
    if broken.row_count:
        console.print(broken)


def _row(cls: Any) -> list[str]:
    bits = [_bits_text(*slot_bits(cls(), dim)) for dim in (128, 64)]
    return [_summary(cls), _options(cls), getattr(cls, "paper", "") or "-", *bits]


def _details(name: str) -> None:
    spec = parse_spec(name)
    console = output_console()
    entry = find_method(name) if name in known_names() else None
    if isinstance(entry, Alias):
        console.print(f"{name} stands for {entry.spec}", highlight=False)
    for side, method in (("K", spec.key), ("V", spec.value)):
        if side == "V" and spec.key == spec.value:
            break
        cls = type(method)
        prefix = "" if spec.key == spec.value else f"{side}: "
        console.rule(f"{prefix}{cls.name}", align="left")
        module = sys.modules[cls.__module__].__doc__ or cls.__doc__ or ""
        console.print(inspect.cleandoc(module), markup=False, highlight=False)
        grid = table(("option", "type", "default", "in this spec", "meaning"), left=5)
        meanings = _meanings(cls)
        types = option_types(cls)
        for option in dataclasses.fields(method):
            value = _text(getattr(method, option.name))
            default = _text(option.default)
            kind, meaning = meanings.get(option.name, (types[option.name].__name__, ""))
            grid.add_row(option.name, kind, default, value if value != default else "", meaning)
        console.print(grid)
    for line in cautions(spec):
        console.print(f"caution: {line}", highlight=False, markup=False)
    console.print("packed slots, bits per value:", highlight=False)
    for dim in (64, 128):
        key_bits, value_bits = slot_bits(spec.key, dim)[0], slot_bits(spec.value, dim)[1]
        console.print(f"  D={dim}: K {key_bits:.4g}, V {value_bits:.4g}", highlight=False)


def _summary(cls: type) -> str:
    return inspect.cleandoc(cls.__doc__ or "").partition("\n")[0]


def _options(cls: type) -> str:
    return " ".join(f"{field.name}={_text(field.default)}" for field in dataclasses.fields(cls))


def _text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _bits_text(key: float, value: float) -> str:
    return f"{key:.4g}" if key == value else f"{key:.4g}/{value:.4g}"


def _meanings(cls: type) -> dict[str, tuple[str, str]]:
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
