"""No compression: K and V as they are, or cast to fp16, bf16 or fp32.

All other methods are compared with it; it uses the same layouts. Bits per value: those of the
dtype.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kvpact.formats import TokenField
from kvpact.formats.packed import PackedFormat
from kvpact.methods.base import Arrays, Codec, Method
from kvpact.quantizers.numbers import CASTS, cast


class ExactCodec(Codec):
    """Stores the numbers themselves."""

    exact = True

    def __init__(self, dim: int, dtype: torch.dtype) -> None:
        self.fields = (TokenField("values", dim, dtype, "codes"),)
        self._dtype = dtype
        self.max_abs = torch.finfo(dtype).max if dtype is torch.float16 else math.inf

    def encode(self, x: Tensor, frozen: Arrays | None = None) -> dict[str, Tensor]:
        """Cast."""
        return {"values": cast(x, self._dtype, "a value")}

    def decode(self, arrays: Arrays) -> Tensor:
        """Cast back to fp32."""
        return arrays["values"].to(torch.float32)

    def packed_format(self) -> PackedFormat:
        """Numbers as they are."""
        return PackedFormat("raw", 8 * self._dtype.itemsize, codes="values")


@dataclass(frozen=True, kw_only=True)
class Exact(Method):
    """No compression: K and V as they are, or cast.

    Parameters
    ----------
    dtype : {"auto", "fp16", "bf16", "fp32"}
        Stored dtype; ``auto`` keeps that of the input.
    """

    name: ClassVar[str] = "none"
    examples: ClassVar[Mapping[str, float]] = {
        "none": 0.0001,
        "none:sinks=4,window=64,dtype=fp16": 0.0003,
    }
    variants: ClassVar[Mapping[str, float]] = {
        "none:dtype=bf16": 0.002,
    }
    sinks: int = 0
    window: int = 0
    dtype: str = "auto"

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_choice("dtype", ("auto", *CASTS))

    def key_codec(self, dim: int, dtype: torch.dtype) -> Codec:
        """Return the codec for keys."""
        return ExactCodec(dim, CASTS.get(self.dtype, dtype))

    value_codec = key_codec
