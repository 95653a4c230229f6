"""Specs: which method for K, which for V, with which options, as text and as JSON.

`NAME[:key=value,...]`, K and V apart by a slash. The dataclass of a method is the only source of
what can be written: parsing, printing, JSON and equality all come from its fields.
"""

from __future__ import annotations

import dataclasses
import json
import re
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from kvpact.callable_package import tells_names
from kvpact.errors import SpecError
from kvpact.registry import Alias, Foreign, find_method, known_names

SPEC_VERSION = 1
_ALWAYS_WRITTEN = ("bits",)
_WHOLE = re.compile(r"[+-]?[0-9]+")
_REAL = re.compile(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?")
_SHORT = re.compile(r"(?:bits=|([a-z]*)[-_]?)([1-9])[-_]?(?:bits?)?")
EXACT = re.compile(r"(b|bfloat|float|f|fp)(16|32)|exact|full|dynamic", re.IGNORECASE)

RECIPE_PREFIX = "recipe:"
"""The prefix of a shipped recipe's name, where specs stand (`kvpact.recipe`)."""
DEFAULT_SPEC = "trellis:bits=4"
"""The spec where none is named: the codec of least error at about 4 bits (`kvpact eval`)."""


class Omitted(str):
    """The default spec where nobody has named one: a budget then begins exact."""


OMITTED = Omitted(DEFAULT_SPEC)


@tells_names({x: f"spec.key.{x}, or spec.value.{x}" for x in ("bits", "name", "sinks", "window")})
@dataclass(frozen=True)
class Spec:
    """A method for the keys and a method for the values.

    Parameters
    ----------
    key, value : Method
        Frozen dataclasses of `kvpact.methods`; the same one for both in most cases.
    slashed : bool
        Whether both are written, equal ones too: for latents one method alone says nothing of the
        other stream. It makes no difference to equality and JSON.
    """

    key: Any
    value: Any
    slashed: bool = field(default=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        if not hasattr(self.key, "key_only") or not hasattr(self.value, "key_only"):
            raise SpecError("a Spec holds methods; write: kvpact.parse_spec('trellis:bits=4')")
        if self.key == self.value:
            return
        for name in self.value.key_only:
            if getattr(self.value, name) != _options(type(self.value))[name]:
                text = method_text(self.value)
                raise SpecError(f"{text!r} for V: {name!r} applies to K only, leave it out")

    def __str__(self) -> str:
        key, value = method_text(self.key), method_text(self.value)
        return key if key == value and not self.slashed else f"{key}/{value}"

    def with_options(self, **options: Any) -> Spec:
        """Return this spec with options of both sides replaced, e.g. ``sinks=0, window=0``."""
        key, value = (_replace(method, options) for method in (self.key, self.value))
        return Spec(key, value, self.slashed)

    def apart(self) -> Spec:
        """Return this spec with a method for V that has no option for K, as in one with a slash."""
        given = _options(type(self.value))
        value = _replace(self.value, {name: given[name] for name in self.value.key_only})
        return self if value == self.value else Spec(self.key, value, self.slashed)

    def codecs(self, dim: int, v_dim: int, dtype: Any) -> tuple[Any, Any]:
        """Return new codecs for K and for V, of these widths and this dtype."""
        return self.key.key_codec(dim, dtype), self.value.value_codec(v_dim, dtype)

    def to_json(self) -> dict[str, Any]:
        """Return the whole spec, defaults written out, as JSON-ready data with versions."""
        return {
            "version": SPEC_VERSION,
            "key": _method_json(self.key),
            "value": _method_json(self.value),
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any] | str) -> Spec:
        """Read what `to_json` gave (data or text). Raises `SpecError` if it isn't that."""
        if isinstance(data, str):
            try:
                data = json.loads(data)
            except (json.JSONDecodeError, RecursionError) as error:
                raise SpecError(f"a spec's JSON can't be read: {error}") from error
        if not isinstance(data, Mapping) or set(data) != {"version", "key", "value"}:
            raise SpecError("a spec's JSON is an object of version, key and value")
        if type(data["version"]) is not int or data["version"] != SPEC_VERSION:
            raise SpecError(
                f"spec version {data['version']!r} is not known; this is {SPEC_VERSION}"
            )
        return cls(_method_from_json(data["key"]), _method_from_json(data["value"]))


def parse_spec(text: str | Spec) -> Spec:
    """Read a spec string such as ``turboquant:bits=4`` or ``int:bits=8/turboquant:bits=3``.

    Short forms with one meaning are read as well: ``trellis:4``, ``int4``, and ``4bit`` or
    ``bits=4`` for so many bits of the default method. A `Spec` is returned as it is.

    Raises
    ------
    SpecError
        Unknown method, unknown or repeated option, a value of the wrong type or out of range,
        white space next to an equals sign.
    """
    if isinstance(text, Spec):
        return text
    if not isinstance(text, str) or not text.strip():
        hint = "; by layer: {'default': 'int4', 'layers': {0: 'none'}}" * isinstance(text, list)
        raise SpecError(f"a spec is text such as {DEFAULT_SPEC!r}, not {text!r:.40}{hint}")
    if text.strip().startswith(RECIPE_PREFIX):
        raise SpecError(f"{text!r} is a recipe, a spec for each layer; here one spec is wanted")
    sides = text.strip().split("/")
    if len(sides) > 2 or "" in sides[1:]:
        raise SpecError(f"{text!r}: at most one slash, between the method for K and the one for V")
    parsed = [_parse_side(side) for side in sides]
    return Spec(parsed[0][0], parsed[-1][1], slashed=len(sides) == 2)


def is_spec(text: str) -> bool:
    """Return whether a text is a spec."""
    try:
        parse_spec(text)
    except SpecError:
        return False
    return True


def method_text(method: Any) -> str:
    """Return a method's canonical text: its name and the options that are not at their default."""
    options = [
        f"{name}={str(value).lower() if isinstance(value, bool) else value}"
        for name, default in _options(type(method)).items()
        if (value := getattr(method, name)) != default or name in _ALWAYS_WRITTEN
    ]
    return str(method.name) + (":" + ",".join(options) if options else "")


def _options(method: type) -> dict[str, Any]:
    """Return a method's options and their defaults, its own before the inherited ones."""
    own = set(vars(method).get("__annotations__", ()))
    fields = sorted(dataclasses.fields(method), key=lambda field: field.name not in own)
    return {field.name: field.default for field in fields}


@cache  # for every class: reading annotations takes a millisecond
def option_types(method: type) -> dict[str, type]:
    """Return a method's options and their types."""
    hints = typing.get_type_hints(method)
    return {name: hints[name] for name in _options(method)}


def _parse_side(text: str) -> tuple[Any, Any]:
    """Return the method for K and for V that one side names (they differ in some aliases)."""
    name, colon, rest = _spelt_out(text.strip()).partition(":")
    if EXACT.fullmatch(name) and name not in known_names():
        raise SpecError(f"unknown method {name!r}; the exact cache is 'none', in any dtype")
    if "," in name and _spelt_out(name.partition(",")[0]).partition(":")[0] in known_names():
        raise SpecError(f"{text!r}: options follow a colon, write {text.replace(',', ':', 1)!r}")
    entry = find_method(name)
    if isinstance(entry, Foreign):
        raise SpecError(f"{name!r} is not offered: {entry.difference}; nearest: {entry.nearest!r}")
    if isinstance(entry, Alias):
        if colon:
            raise SpecError(f"{name!r} takes no options, it is exactly {entry.spec!r}; write that")
        spec = parse_spec(entry.spec)
        return spec.key, spec.value
    types, options = option_types(entry), {}
    if colon and not rest:
        raise SpecError(f"{text!r}: after the colon come options such as {next(iter(types))}=...")
    for item in rest.split(",") if rest else ():
        key, equals, value = item.strip().partition("=")
        if not equals and key.isdecimal() and "bits" in types:
            key, equals, value = "bits", "=", key
        if ":" in key or (not equals and key in known_names()):
            line = "each stands by itself, or one for K and one for V around a slash"
            raise SpecError(f"{text!r} names two methods; {line}: {text.replace(',', '/', 1)!r}")
        if not equals:
            raise SpecError(f"{text!r}: {item!r} is no key=value")
        if key in options:
            raise SpecError(f"{text!r}: {key!r} stands twice")
        options[key] = _parse_value(name, key, value, types)
    method = entry(**options)
    return method, method


def free_options(text: str) -> set[str]:
    """Return the options of both methods of a spec that its text leaves open; none in an alias."""
    spec = parse_spec(text)
    free = option_types(spec.key.__class__).keys() & option_types(spec.value.__class__).keys()
    for side in text.split("/"):
        name, _, rest = _spelt_out(side.strip()).partition(":")
        named = {item.strip().partition("=")[0] for item in rest.split(",")}
        named |= {"bits"} if any(map(str.isdecimal, named)) else set()
        free -= free if isinstance(find_method(name), Alias) else named
    return free


def _spelt_out(text: str) -> str:
    """Return a side as it is spelt, where it begins with a short form: ``int4``, ``bits=4``."""
    name, colon, rest = text.partition(":")
    short = _SHORT.fullmatch(name.lower())
    if short is None or name in (known := known_names()) or short[1] not in (None, "", *known):
        return text
    method = short[1] or DEFAULT_SPEC.partition(":")[0]
    return f"{method}:bits={short[2]}" + (f",{rest}" if colon else "")


def _parse_value(method: str, key: str, text: str, types: Mapping[str, type]) -> Any:
    if key not in types:
        raise SpecError(f"{method!r} has no option {key!r}; it has {', '.join(types)}")
    kind = types[key]
    try:
        if kind is bool:
            return {"true": True, "false": False, "1": True, "0": False}[text.lower()]
        if kind is int:
            return whole_number(text)
        if kind is float and not _REAL.fullmatch(text):
            raise ValueError
        return kind(text)
    except (ValueError, KeyError):
        hint = "; options stand apart by commas, specs in a list" if {*" :;&?"} & {*text} else ""
        message = f"{method!r}: {key}={text!r} should be of type {kind.__name__}{hint}"
        raise SpecError(message) from None


def whole_number(text: str) -> int:
    """Read a whole number as `int` does but for underscores and blanks. Raises `ValueError`."""
    if not _WHOLE.fullmatch(text):
        raise ValueError(f"{text!r} is no whole number")
    return int(text)


def _replace(method: Any, options: Mapping[str, Any]) -> Any:
    unknown = [name for name in options if name not in option_types(method.__class__)]
    if unknown:
        raise SpecError(f"{method.name!r} has no option {unknown[0]!r}")
    return dataclasses.replace(method, **options)


def _method_json(method: Any) -> dict[str, Any]:
    added = getattr(method, "added", ())
    options = {
        field.name: getattr(method, field.name)
        for field in dataclasses.fields(method)
        if field.name not in added or getattr(method, field.name) != field.default
    }
    return {"method": method.name, "version": method.version, **options}


def _method_from_json(data: Any) -> Any:
    if not isinstance(data, Mapping) or not isinstance(data.get("method"), str):
        raise SpecError("a method's JSON is an object with its name under 'method'")
    entry = find_method(data["method"])
    if isinstance(entry, Alias | Foreign):
        raise SpecError(f"{data['method']!r} is an alias; JSON names the method itself")
    if data.get("version") != entry.version:
        raise SpecError(
            f"{entry.name!r} version {data.get('version')!r} is not known; this is "
            f"{entry.version}: read it with the kvpact that wrote it, or store its tokens again"
        )
    options = {key: value for key, value in data.items() if key not in ("method", "version")}
    types = option_types(entry)
    added = getattr(entry, "added", ())
    missing = [key for key in types if key not in options and key not in added]
    if missing:
        raise SpecError(
            f"{entry.name!r}: the JSON lacks {', '.join(missing)}; it names all options"
        )
    for key, value in options.items():
        if key not in types:
            raise SpecError(f"{entry.name!r} has no option {key!r}; it has {', '.join(types)}")
        if type(value) is not types[key]:
            raise SpecError(f"{entry.name!r}: {key}={value!r} should be a {types[key].__name__}")
    return entry(**options)
