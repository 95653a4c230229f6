"""The base of the checks of a method."""

from __future__ import annotations

from collections.abc import Callable
from math import lcm
from typing import ClassVar

import pytest
import torch
from torch import Tensor

from kvpact.formats import TILE
from kvpact.methods import Codec
from kvpact.spec import Spec, parse_spec
from kvpact.testing.data import Shape, ShapeKit, random_tokens
from kvpact.testing.depends import Check, Reason, depends_on

Arrays = dict[str, Tensor]


def both_sides(reason: Reason | None = None) -> Callable[[Check], Check]:
    """Make a check for K and for V, and say what it depends on (see `depends_on`)."""
    sides = pytest.mark.parametrize("side", ["key", "value"])
    return lambda check: sides(check if reason is None else depends_on(reason)(check))


def new_codec(spec: str, side: str, dim: int, dtype: torch.dtype) -> Codec:
    """Return a new codec of a spec for K (``key``) or V (``value``)."""
    codec: Codec = getattr(getattr(parse_spec(spec), side), f"{side}_codec")(dim, dtype)
    return codec


class MethodKit(ShapeKit):
    """The method under test; `MethodContract` says what its attributes are."""

    spec: ClassVar[str]
    max_relative_error: ClassVar[float] = 1.0

    def parsed(self) -> Spec:
        """Return the spec, parsed."""
        return parse_spec(self.spec)

    def codec(
        self, side: str, dim: int, dtype: torch.dtype = torch.float32, heads: int = 1
    ) -> Codec:
        """Return a new codec for K (``key``) or V (``value``) of so many heads."""
        return new_codec(self.spec, side, dim, dtype)

    def sample(self, side: str, shape: Shape, seed: int = 0) -> tuple[Codec, Tensor]:
        """Return a codec and tokens for it: fp32, rounded to the shape's dtype, whole groups."""
        dim = shape.dim if side == "key" else shape.v_dim
        codec = self.codec(side, dim, shape.dtype, shape.heads)
        tokens = -(-shape.tokens // codec.group) * codec.group
        x = random_tokens(shape.batch, shape.heads, tokens, dim, seed=seed, dtype=shape.dtype)
        return codec, x.float()


def capacity(codec: Codec, tokens: int) -> int:
    """Return the least number of tokens from `tokens` on that is whole units of every field."""
    unit = lcm(TILE, codec.group, *(field.tokens for field in codec.fields))
    return -(-tokens // unit) * unit


def allocate(codec: Codec, x: Tensor, tokens: int) -> Arrays:
    """Return empty storage for `tokens` tokens of the rows and heads of `x`, by field name."""
    batch, heads = x.shape[:2]
    return {field.name: field.allocate(batch, heads, tokens, x.device) for field in codec.fields}


def write(codec: Codec, storage: Arrays, start: int, arrays: Arrays) -> None:
    """Write what `encode` returned into storage."""
    for field in codec.fields:
        if field.name in arrays:
            field.write(storage[field.name], start, arrays[field.name])


def stored(codec: Codec, x: Tensor, tokens: int | None = None) -> Arrays:
    """Return storage that holds the encoded `x`."""
    storage = allocate(codec, x, capacity(codec, tokens or x.shape[2]))
    write(codec, storage, 0, codec.encode(x))
    return storage


def decode_storage(codec: Codec, storage: Arrays) -> Tensor:
    """Return all tokens of storage, still transformed."""
    return codec.decode({field.name: field.read(storage[field.name]) for field in codec.fields})


def relative_error(x: Tensor, y: Tensor) -> float:
    """Return `|y - x| / |x|`."""
    return float((y.double() - x.double()).norm() / x.double().norm())
