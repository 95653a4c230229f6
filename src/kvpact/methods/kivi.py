"""KIVI: keys per channel, values per token (Liu et al., ICML 2024, arXiv:2402.02750).

`x ~ zero + scale * code` with `zero = min` and `scale = (max - min) / (2**bits - 1)`, both fp16.
For K, `group` tokens of one channel share scale and zero; for V, `group` channels of one token do.
Codes are computed from scale and zero as rounded to fp16. Bits per value: bits + 32/group; a group
of channels is at most as wide as the vectors. The paper's settings are ``kivi:bits=2,group=32`` and
``kivi:bits=4,group=32``; its residual of 128 exact tokens is ``window=128``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kvpact.formats import CodesField, GroupField
from kvpact.formats.encoding import Encoding
from kvpact.formats.packed import PackedFormat, integer_format
from kvpact.methods.base import Arrays, Codec, Method
from kvpact.methods.integer import IntegerCodec
from kvpact.quantizers import uniform
from kvpact.quantizers.numbers import HALF_MAX


class ChannelCodec(Codec):
    """One grid per channel and group of tokens."""

    max_abs = HALF_MAX

    def __init__(self, dim: int, bits: int, group: int) -> None:
        self._bits, self.group = bits, group
        self.fields = (
            CodesField("codes", bits, dim, "token"),
            GroupField("scale", dim, group),
            GroupField("zero", dim, group),
        )

    def encode(self, x: Tensor, frozen: Arrays | None = None) -> dict[str, Tensor]:
        """Round the tokens of each channel."""
        if frozen is not None:
            return {
                "codes": uniform.quantize_affine(x, frozen["scale"], frozen["zero"], self._bits)
            }
        channels = torch.unflatten(x, 2, (-1, self.group)).mT
        scale, zero = uniform.affine_grid(channels, self._bits)
        codes = uniform.quantize_affine(channels, scale, zero, self._bits)
        return {
            "codes": codes.mT.flatten(2, 3),
            "scale": scale.squeeze(-1),
            "zero": zero.squeeze(-1),
        }

    def decode(self, arrays: Arrays) -> Tensor:
        """Undo `encode`."""
        codes = torch.unflatten(arrays["codes"], 2, (-1, self.group))
        scale, zero = arrays["scale"].unsqueeze(3), arrays["zero"].unsqueeze(3)
        return uniform.dequantize_affine(codes, scale, zero).flatten(2, 3)

    def packed_format(self) -> PackedFormat:
        """Whole numbers, scale and zero per channel and group of tokens."""
        return integer_format(self._bits, None, fold="scale", shift="zero", group=self.group)

    def encoding(self) -> Encoding:
        """Integers per channel and group of tokens."""
        return Encoding("channel", self._bits, HALF_MAX, group=self.group, zero="zero")


@dataclass(frozen=True, kw_only=True)
class KIVI(Method):
    """KIVI: keys per channel, values per token, both with a zero point.

    Parameters
    ----------
    bits : int
        2 to 8; the paper has 2 and 4.
    group : {32, 64, 128}
        Tokens (K) or channels (V) that share a scale and a zero.
    """

    name: ClassVar[str] = "kivi"
    paper: ClassVar[str] = "arXiv:2402.02750"
    examples: ClassVar[Mapping[str, float]] = {
        "kivi:bits=2": 0.48,
        "kivi:bits=4,sinks=0,window=0": 0.09,
        "kivi:bits=4,group=128,window=128": 0.12,
    }
    variants: ClassVar[Mapping[str, float]] = {
        "kivi:bits=2,group=64": 0.56,
    }
    bits: int = 2
    group: int = 32

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_choice("bits", range(2, 9))
        self.check_choice("group", (32, 64, 128))

    def key_codec(self, dim: int, dtype: torch.dtype) -> Codec:
        """Return the codec for keys."""
        return ChannelCodec(dim, self.bits, self.group)

    def value_codec(self, dim: int, dtype: torch.dtype) -> Codec:
        """Return the codec for values."""
        return IntegerCodec(dim, self.bits, self.group, True, "channel")
