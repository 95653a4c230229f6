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

from kvpact.formats.form import Form, Levels, Side
from kvpact.methods.base import Codec, Method
from kvpact.methods.integer import integers
from kvpact.methods.rules import FormCodec
from kvpact.quantizers.numbers import HALF_MAX


@dataclass(frozen=True, kw_only=True)
class KIVI(Method):
    """KIVI: keys per channel, values per token, both with a zero point.

    Parameters
    ----------
    bits : int
        2 to 8; the paper has 2 and 4.
    group : {32, 64, 128}
        Tokens (K) or channels (V) that share a scale and a zero.

    Examples
    --------
    >>> codec = make_codec(KIVI(bits=2), False, 8, torch.float32)
    >>> codes = codec.encode(torch.tensor([[[[-7.0, -4, -2, -1, 0, 1, 3, 8]]]]))
    >>> {name: x.flatten().tolist() for name, x in codes.items()}
    {'codes': [0, 1, 1, 1, 1, 2, 2, 3], 'scale': [5.0], 'zero': [-7.0]}
    """

    name: ClassVar[str] = "kivi"
    paper: ClassVar[str] = "arXiv:2402.02750"
    examples: ClassVar[Mapping[str, float]] = {
        "kivi:bits=2": 0.48,
        "kivi:bits=4,sinks=0,window=0": 0.09,
        "kivi:bits=4,group=128,window=128": 0.12,
    }
    variants: ClassVar[Mapping[str, float]] = {"kivi:bits=2,group=64": 0.56}
    bits: int = 2
    group: int = 32

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_choice("bits", range(2, 9))
        self.check_choice("group", (32, 64, 128))

    def key_codec(self, dim: int, dtype: torch.dtype) -> Codec:
        """Return the codec for keys."""
        sides = (Side("scale", "mul", tokens=self.group), Side("zero", "add", tokens=self.group))
        form = Form(dim, "token", Levels("grid", self.bits), sides, "minmax", HALF_MAX)
        return FormCodec(form, max_abs=HALF_MAX)

    def value_codec(self, dim: int, dtype: torch.dtype) -> Codec:
        """Return the codec for values."""
        return integers(dim, self.bits, self.group, True, "channel")
