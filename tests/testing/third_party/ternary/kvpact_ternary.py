"""Ternary codes {-1, 0, 1} times one scale per token (Li and Liu, arXiv:1605.04711).

A coordinate is zero below .7 times the mean magnitude; the scale is the mean of the others.
Bits per value: 2 + 16/D.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch

from kvpact.arithmetic import tree_sum
from kvpact.formats import CodesField, TokenField
from kvpact.methods import Codec, Method
from kvpact.quantizers.numbers import half


class TernaryCodec(Codec):
    """One stream."""

    def __init__(self, dim, order):
        self.fields = (CodesField("codes", 2, dim, order), TokenField("scale", 1))

    def encode(self, x, frozen=None):
        """Round."""
        size = x.abs()
        large = size > 0.7 * tree_sum(size) / x.shape[-1]
        count = tree_sum(large.float()).clamp(min=1)
        scale = half(tree_sum(size * large) / count, "scale of a token")
        return {"codes": (x.sign() * large + 1).to(torch.uint8), "scale": scale}

    def decode(self, arrays):
        """Undo."""
        return (arrays["codes"].float() - 1) * arrays["scale"].float()


@dataclass(frozen=True, kw_only=True)
class Ternary(Method):
    """Ternary weights networks' quantiser."""

    name: ClassVar[str] = "ternary"
    codec: ClassVar[type] = TernaryCodec

    def key_codec(self, dim, dtype):
        """For keys."""
        return self.codec(dim, "token")

    def value_codec(self, dim, dtype):
        """For values."""
        return self.codec(dim, "channel")
