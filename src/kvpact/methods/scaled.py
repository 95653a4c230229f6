"""Tokens times a power of two, for layers whose numbers lie below what side information holds.

Scales in fp16 lose their precision below `2^-14` and end at `2^-24`, those of 8 bits at `2^-16`.
The power is kept with what the codec has learnt; torch computes for such layers.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from kvpact.errors import FormatError
from kvpact.methods.base import Arrays, Codec
from kvpact.methods.context import Context

LEAST = 2.0**-11
"""First tokens without a larger number are scaled."""
_AIM = -4  # later tokens may be a million times larger, or a thousand times smaller
_MOST = 120
NAME = "power"


class ScaledCodec(Codec):
    """A codec of tokens times `2^power`."""

    def __init__(self, codec: Codec, power: int) -> None:
        self.codec, self.power, self._factor = codec, power, 2.0**power
        self.fields, self.group, self.transform = codec.fields, codec.group, codec.transform
        self.joint, self.rotation = codec.joint, codec.rotation
        self.learns_from = codec.learns_from
        self.max_abs, self.max_norm = (x / self._factor for x in (codec.max_abs, codec.max_norm))
        self._power = torch.tensor([power], dtype=torch.int16, device="cpu")

    def encode(self, x: Tensor, frozen: Arrays | None = None) -> dict[str, Tensor]:
        """Scale, and encode."""
        return self.codec.encode(x * self._factor, frozen)

    def decode(self, arrays: Arrays) -> Tensor:
        """Undo `encode` but for the transform."""
        return self.codec.decode(arrays) / self._factor

    def learn(self, x: Tensor, context: Context) -> Codec:
        """Return a codec that learnt from scaled tokens."""
        return ScaledCodec(self.codec.learn(x * self._factor, context), self.power)

    def state(self) -> dict[str, Tensor]:
        """Return the power, and what the codec has learnt."""
        return {NAME: self._power, **self.codec.state()}

    @property
    def ready(self) -> bool:
        """True once the codec has learnt all that it learns from tokens."""
        return self.codec.ready


def scaled_for(codec: Codec, size: float) -> Codec:
    """Return a codec for tokens whose first ones have a largest magnitude of `size`."""
    if codec.exact or codec.has_bias or not 0 < size < LEAST:
        return codec
    return ScaledCodec(codec, min(_AIM - math.frexp(size)[1], _MOST))


def scaled_as(codec: Codec, power: Tensor) -> Codec:
    """Return a codec with the power of a state. Raises `FormatError`."""
    good = power.shape == (1,) and power.dtype is torch.int16 and 0 < int(power) <= _MOST
    if codec.exact or not good:
        raise FormatError("the snapshot can't be right: a power of two that no method has")
    return ScaledCodec(codec, int(power))


def size_of(codec: Codec) -> float:
    """Return a largest magnitude for which `scaled_for` has a codec's power; 0 where none."""
    return 2.0 ** (_AIM - codec.power - 1) if isinstance(codec, ScaledCodec) else 0.0
