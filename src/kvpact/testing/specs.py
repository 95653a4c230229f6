"""The one table of specs with which every registered method is tested.

A method names specs in its `examples`, the most telling one first, and further ones in `variants`;
a method that names none is tested with its defaults. So a method is in every matrix of tests that
reads this table once it is registered.
"""

import torch

from kvpact.methods.fitted import FittedCodec
from kvpact.registry import Alias, list_methods
from kvpact.spec import parse_spec

_ALIASES = {"q8_0": 0.0067, "tq3": 0.265}  # aliases with sinks and window of 0, as they are written

_MIXED = {
    "int:bits=8,sinks=2/turboquant:bits=3,window=7": 0.192,
    "turboquant:bits=3,center=64/kivi:bits=2": 0.48,
    "kivi:bits=4/kvarn:bits=4": 0.122,
}
"""One method for K and another for V: with unlike sinks, windows and groups."""


def method_specs(*, fitted: bool | None = None, grouped: bool | None = None) -> list[str]:
    """Return one spec of every registered method, for matrices that take long.

    Parameters
    ----------
    fitted : bool, optional
        Only methods that learn from tokens (True), or only others (False).
    grouped : bool, optional
        Only methods that code groups of tokens, or only others.
    """
    first = [next(iter(_examples(name, method))) for name, method in _methods().items()]
    return [spec for spec in first if _is(spec, fitted, grouped)]


def example_specs(*, fitted: bool | None = None, grouped: bool | None = None) -> dict[str, float]:
    """Return all example specs with the largest relative error that each may have.

    The error is `|decoded - x| / |x|` over N(0, 1) tokens of a width up to 576. Parameters as in
    `method_specs`.
    """
    found: dict[str, float] = {}
    for name, method in _methods().items():
        found |= _examples(name, method)
    found |= _ALIASES | _MIXED
    return {spec: error for spec, error in found.items() if _is(spec, fitted, grouped)}


def variant_specs(*, fitted: bool | None = None, grouped: bool | None = None) -> dict[str, float]:
    """Return further options of the same codecs, which only the codecs' own tests need."""
    found: dict[str, float] = {}
    for method in _methods().values():
        found |= getattr(method, "variants", {})
    return {spec: error for spec, error in found.items() if _is(spec, fitted, grouped)}


def _methods() -> dict[str, type]:
    return {n: m for n, m in list_methods().items() if not isinstance(m, Alias)}


def _examples(name: str, method: type) -> dict[str, float]:
    examples: dict[str, float] = dict(getattr(method, "examples", {}))
    return examples or {name: 1.0}


def _is(text: str, fitted: bool | None, grouped: bool | None) -> bool:
    codecs = parse_spec(text).codecs(64, 64, torch.float32)
    learns = any(isinstance(codec, FittedCodec) for codec in codecs)
    groups = any(codec.group > 1 for codec in codecs)
    return fitted in (None, learns) and grouped in (None, groups)
