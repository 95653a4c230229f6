"""8-bit floating point (Micikevicius et al., FP8 formats for deep learning, arXiv:2209.05433).

`x ~ scale * fp8(x / scale)`. With ``scale=token`` the largest magnitude of a token becomes the
format's largest number (e4m3: 448, e5m2: 57,344). With ``scale=none`` the numbers are rounded as
they are, as serving engines do by default, and a number beyond the range is refused. Bits per
value: 8, and 16/D for the scale if there is one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch

from kvpact.formats import Order
from kvpact.formats.form import Form, Levels, Side
from kvpact.methods.base import Codec, Method
from kvpact.methods.rules import FormCodec
from kvpact.quantizers.numbers import FP8 as NUMBERS
from kvpact.quantizers.numbers import HALF_MAX


@dataclass(frozen=True, kw_only=True)
class FP8(Method):
    """8-bit floating point, e4m3 or e5m2.

    Parameters
    ----------
    format : {"e4m3", "e5m2"}
        4 exponent and 3 mantissa bits, or 5 and 2.
    scale : {"token", "none"}
        An fp16 scale per token and head, or none.

    Examples
    --------
    >>> codec = make_codec(FP8(), False, 8, torch.float32)
    >>> codes = codec.encode(torch.tensor([[[[-7.0, -4, -2, -1, 0, 1, 3, 8]]]]))
    >>> {name: x.flatten().tolist() for name, x in codes.items()}
    {'codes': [252, 246, 238, 230, 0, 102, 115, 126], 'scale': [0.017852783203125]}
    """

    name: ClassVar[str] = "fp8"
    paper: ClassVar[str] = "arXiv:2209.05433"
    examples: ClassVar[Mapping[str, float]] = {"fp8": 0.028, "fp8:format=e5m2,scale=none": 0.06}
    format: str = "e4m3"
    scale: str = "token"

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_choice("format", NUMBERS)
        self.check_choice("scale", ("token", "none"))

    def codec(self, dim: int, dtype: torch.dtype, order: Order) -> Codec:
        """Return the codec for keys or for values."""
        most = torch.finfo(NUMBERS[self.format]).max
        scaled = self.scale == "token"
        sides, limit = ((Side("scale", "mul"),), 0.99 * HALF_MAX * most) if scaled else ((), most)
        levels = Levels("float", 8, number=self.format)
        return FormCodec(Form(dim, "token", levels, sides, "absmax", limit))
