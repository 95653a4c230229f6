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

from kvpact.formats import Order
from kvpact.formats.form import DTYPES, Form, Levels
from kvpact.methods.base import Codec, Method
from kvpact.methods.rules import FormCodec


class ExactCodec(FormCodec):
    """Stores the numbers themselves."""

    exact = True

    def __init__(self, dim: int, dtype: torch.dtype) -> None:
        name = next(name for name, known in DTYPES.items() if known is dtype)
        levels = Levels("raw", 8 * dtype.itemsize, number=name)
        most = torch.finfo(dtype).max if dtype is torch.float16 else math.inf
        super().__init__(Form(dim, "token", levels, (), "cast"), max_abs=most)


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
    variants: ClassVar[Mapping[str, float]] = {"none:dtype=bf16": 0.002}
    sinks: int = 0
    window: int = 0
    dtype: str = "auto"

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_choice("dtype", ("auto", *DTYPES))

    def codec(self, dim: int, dtype: torch.dtype, order: Order) -> Codec:
        """Return the codec for keys or for values."""
        return ExactCodec(dim, DTYPES.get(self.dtype, dtype))
