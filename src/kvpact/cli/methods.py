"""``kvpact methods``: the methods, their options and their bits."""

import dataclasses
import inspect
import sys
from typing import Any

import typer

from kvpact.cli import options
from kvpact.cli.console import explain, output_console, print_document, print_table
from kvpact.data import method_advice
from kvpact.registry import Alias, Foreign, find_method, known_names
from kvpact.spec import Spec, option_types, parse_spec

WIDTHS = (64, 128)


def methods(
    name: str | None = typer.Argument(
        None, help="A method, an alias or a whole spec.", autocompletion=options.complete_spec
    ),
    as_json: bool = options.JSON,
) -> None:
    """List the methods, or explain one."""
    found = all_methods() if name is None else one_method(name)
    if as_json:
        print_document("methods", **found)
    elif name is None:
        _show_all(found)
    else:
        _show_one(name, found)


def _show_all(found: dict[str, list[dict[str, Any]]]) -> None:
    rows = []
    for one in found["methods"]:
        choices = " ".join(f"{name}={option_text(value)}" for name, value in one["options"].items())
        k, v = (f"{one['slot_bits'][-1][side]:.4g}" for side in "kv")
        rows.append((one["name"], one["summary"], choices, k if k == v else f"{k}/{v}"))
    print_table(("method", "what it is", "options and defaults", "bits,\nD=128"), rows, left=3)
    explain(
        "Bits per value of the packed slots at the defaults, K and V apart by a slash where they "
        "differ; exact sinks and window come on top. K and V by unlike methods: int:bits=8/kivi. "
        "More: kvpact methods NAME"
    )
    print_table(("alias", "stands for"), map(dict.values, found["aliases"]), left=2)
    if found["broken"]:
        print_table(("can't be used", "why"), map(dict.values, found["broken"]), left=2)


def _show_one(name: str, found: dict[str, Any]) -> None:
    def say(text: str) -> None:
        output_console().print(text, markup=False, highlight=False)

    if found["alias_of"] is not None:
        say(f"{name} stands for {found['alias_of']}")
    for one in found["methods"]:
        prefix = "" if one["side"] == "both" else f"{one['side'].upper()}: "
        output_console().rule(f"{prefix}{one['name']}", align="left")
        say(f"{one['summary']} {one['use']}".strip())
        for line in one["avoid"]:
            say(f"when not: {line}")
    bits = (f"K {x['k']:.4g}, V {x['v']:.4g} at width {x['width']}" for x in found["slot_bits"])
    say(f"bits per value, packed: {'; '.join(bits)}")
    say(f"what it loses: kvpact eval {found['spec']}")
    for line in found["cautions"]:
        say(f"caution: {line}")
    for one in found["methods"]:
        rows = []
        for x in one["options"]:
            value, default = option_text(x["value"]), option_text(x["default"])
            value += "" if value == default else f", not {default}"
            rows.append((x["name"], value, x["type"], x["meaning"]))
        print_table((f"{one['name']} has", "now", "type", "meaning"), rows, left=4)
    for one in found["methods"]:
        say(f"How {one['name']} works\n\n{one['text']}\n")


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
    """Return the facts about a method, an alias or a whole spec."""
    from kvpact.methods.cautions import cautions

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
    return {
        "summary": inspect.cleandoc(cls.__doc__ or "").partition("\n")[0],
        "options": {field.name: field.default for field in dataclasses.fields(cls)},
        "paper": getattr(cls, "paper", "") or None,
        "slot_bits": _slot_bits(Spec(cls(), cls())),
    }


def slot_bits(spec: Spec, dim: int) -> tuple[float, float]:
    """Return the bits per value of packed slots of K and of V, `dim` wide and given in fp16."""
    import torch

    from kvpact.methods import bytes_per_slot

    k, v = spec.codecs(dim, dim, torch.float16)
    return 8 * bytes_per_slot(k) / dim, 8 * bytes_per_slot(v) / dim


def option_text(value: object) -> str:
    """Return an option's value as a spec has it."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def _slot_bits(spec: Spec) -> list[dict[str, Any]]:
    bits = [(dim, slot_bits(spec, dim)) for dim in WIDTHS]
    return [{"width": dim, "k": k, "v": v} for dim, (k, v) in bits]


def _side(method: Any) -> dict[str, Any]:
    """Return the text and the options of a method."""
    cls: Any = type(method)
    types, known = option_types(cls), meanings(cls)
    options = []
    for option in dataclasses.fields(method):
        kind, meaning = known.get(option.name, (types[option.name].__name__, ""))
        values = {"default": option.default, "value": getattr(method, option.name)}
        options.append({"name": option.name, "type": kind, **values, "meaning": meaning})
    text = inspect.cleandoc(sys.modules[cls.__module__].__doc__ or cls.__doc__ or "")
    advice = {"use": "", "avoid": [], **method_advice().get(cls.name, {})}
    summary = inspect.cleandoc(cls.__doc__ or "").partition("\n")[0]
    return {"name": cls.name, "summary": summary, **advice, "text": text, "options": options}


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
