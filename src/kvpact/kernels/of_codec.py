"""What kernels know of a codec: which fields its slots have; and what is made for it once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any, Concatenate, Literal, ParamSpec, TypeVar
from weakref import WeakKeyDictionary

from kvpact.formats import CodesField, Field
from kvpact.formats.encoding import Encoding
from kvpact.formats.packed import PackedFormat
from kvpact.methods import Codec

C = TypeVar("C", bound=Codec)
P = ParamSpec("P")
T = TypeVar("T")


def slot_fields(
    codec: Codec, form: PackedFormat | Encoding, names: Sequence[str]
) -> dict[str, Field]:
    """Return the fields that are there, in the order of `names`."""
    held = {field.name: field for field in codec.fields}
    if isinstance(form, PackedFormat) and form.trellis is None:
        named = [getattr(form, name, None) for name in names]
    else:
        named = ["mean_step" if name == "step" else name for name in names]
    return {name: held[own] for name, own in zip(names, named, strict=True) if own in held}


def order_and_width(codes: Field) -> tuple[Literal["token", "channel", "number"], int]:
    """Return what a word of codes holds, ``number`` where there are no words; and their width."""
    return (codes.order, codes.dim) if isinstance(codes, CodesField) else ("number", codes.shape[0])


def once_for_codec(make: Callable[Concatenate[C, P], T]) -> Callable[Concatenate[C, P], T]:
    """Make something for a codec once, and anew when it has learnt; a decorator."""
    known: WeakKeyDictionary[Codec, dict[Any, T]] = WeakKeyDictionary()

    @wraps(make)
    def made(codec: C, /, *args: P.args, **named: P.kwargs) -> T:
        found, key = known.setdefault(codec, {}), (codec.ready, args, *named.items())
        if key not in found:
            found[key] = make(codec, *args, **named)
        return found[key]

    return made
