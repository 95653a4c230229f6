"""A decorator for what is made once for a codec."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeVar
from weakref import WeakKeyDictionary

from kvpact.methods import Codec

C = TypeVar("C", bound=Codec)
P = ParamSpec("P")
T = TypeVar("T")


def once_for_codec(make: Callable[Concatenate[C, P], T]) -> Callable[Concatenate[C, P], T]:
    """Make something for a codec once, and again when it has learnt; a decorator."""
    known: WeakKeyDictionary[Codec, dict[Any, T]] = WeakKeyDictionary()

    @wraps(make)
    def made(codec: C, /, *args: P.args, **named: P.kwargs) -> T:
        found, key = known.setdefault(codec, {}), (codec.ready, args, *named.items())
        if key not in found:
            found[key] = make(codec, *args, **named)
        return found[key]

    return made
