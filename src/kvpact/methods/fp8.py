"""8-bit floating point (Micikevicius et al., FP8 formats for deep learning, arXiv:2209.05433).

`x ~ scale * fp8(x / scale)`. With ``scale=token`` the largest magnitude of a token becomes the
format's largest number (e4m3: 448, e5m2: 57,344). With ``scale=none`` the numbers are rounded as
they are, as serving engines do by default, and a number beyond the range is refused. Bits per
value: 8, and 16/D for the scale if there is one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from kvpact.arithmetic import divide
from kvpact.formats import TokenField
from kvpact.formats.encoding import Encoding
from kvpact.formats.packed import PackedFormat
from kvpact.methods.base import Arrays, Codec, Method
from kvpact.quantizers import numbers
from kvpact.quantizers.numbers import from_fp8, half, to_fp8


class FP8Codec(Codec):
    """fp8 bytes and, if asked for, an fp16 scale per token."""

    def __init__(self, dim: int, kind: str, scaled: bool) -> None:
        self._kind, self._scaled = kind, scaled
        codes = TokenField("codes", dim, torch.uint8, "codes")
        self.fields = (codes, TokenField("scale", 1)) if scaled else (codes,)

    def encode(self, x: Tensor, frozen: Arrays | None = None) -> dict[str, Tensor]:
        """Scale and round."""
        if not self._scaled:
            return {"codes": to_fp8(x, self._kind, saturate=False)}
        limit = torch.finfo(numbers.FP8[self._kind]).max
        scale = half(divide(x.abs().amax(-1, keepdim=True), limit), "scale")
        # A scale that underflows to zero stores zeros; rounding of the scale can carry the
        # largest value just over the limit, hence saturate.
        safe = torch.where(scale == 0, torch.ones_like(scale), scale).to(torch.float32)
        return {"codes": to_fp8(x / safe, self._kind, saturate=True), "scale": scale}

    def decode(self, arrays: Arrays) -> Tensor:
        """Undo the scaling."""
        x = from_fp8(arrays["codes"], self._kind)
        return x * arrays["scale"].to(torch.float32) if self._scaled else x

    def packed_format(self) -> PackedFormat:
        """8-bit numbers, a scale per token or none."""
        kind: Literal["e4m3", "e5m2"] = "e4m3" if self._kind == "e4m3" else "e5m2"
        return PackedFormat(kind, 8, scale="scale" if self._scaled else None)

    def encoding(self) -> Encoding:
        """8-bit numbers."""
        most = torch.finfo(numbers.FP8[self._kind]).max
        if not self._scaled:
            return Encoding("float8", 8, most, self._kind, scale=None)
        return Encoding("float8", 8, 0.99 * numbers.HALF_MAX * most, self._kind)


@dataclass(frozen=True, kw_only=True)
class FP8(Method):
    """8-bit floating point, e4m3 or e5m2.

    Parameters
    ----------
    format : {"e4m3", "e5m2"}
        4 exponent and 3 mantissa bits, or 5 and 2.
    scale : {"token", "none"}
        An fp16 scale per token and head, or none.
    """

    name: ClassVar[str] = "fp8"
    paper: ClassVar[str] = "arXiv:2209.05433"
    examples: ClassVar[Mapping[str, float]] = {
        "fp8": 0.028,
        "fp8:format=e5m2,scale=none": 0.06,
    }
    format: str = "e4m3"
    scale: str = "token"

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_choice("format", numbers.FP8)
        self.check_choice("scale", ("token", "none"))

    def key_codec(self, dim: int, dtype: torch.dtype) -> Codec:
        """Return the codec for keys."""
        return FP8Codec(dim, self.format, self.scale == "token")

    value_codec = key_codec
