"""Integers of 2 to 8 bits, rounded to nearest, per token in groups of channels.

Symmetric: `x ~ scale * (code - 2**(bits - 1))` with an fp16 scale per group, exactly as GGUF's q8_0
and q4_0 where bits is 8 or 4 and group is 32. With ``zero=true``: `x ~ zero + scale * code`, both
fp16. Bits per value: bits + 16/group, or bits + 32/group with zeros; a group is at most as wide as
the vectors.

With ``rotate=true`` the same is done to `y = R x`, where R is a Hadamard transform with random
signs; `x ~ R^T y`. An outlier channel is then spread over all of them, so one scale per token (a
group as wide as the vectors) is enough. `turboquant` has the same rotation but levels that follow
the normal distribution. At 4 bits and one scale per token its distortion on normal data is lower:
.0092 against .0107 where D = 128, and .0089 against .0090 where D = 64.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from kvpact.formats import Order
from kvpact.formats.form import Form, Levels, Side
from kvpact.methods.base import Codec, Method
from kvpact.methods.rules import FormCodec
from kvpact.quantizers.numbers import HALF_MAX
from kvpact.transforms import IDENTITY, RandomHadamard, Transform


def integers(
    dim: int, bits: int, group: int, zero: bool, order: Order, transform: Transform = IDENTITY
) -> FormCodec:
    """Return the codec of codes of `transform.forward(x)` in groups of channels; see `Integer`."""
    channels, middle = min(group, dim), 1 << (bits - 1)
    limit = HALF_MAX if zero else 0.99 * HALF_MAX * (127 if bits == 8 else middle)
    if transform is not IDENTITY:  # it keeps the length, and may put all of it into one channel
        limit /= 1.01 * math.sqrt(dim)
    sides = (Side("scale", "mul", channels), Side("zero", "add", channels))
    levels = Levels("grid", bits, zero_code=0 if zero else middle)
    made = Form(dim, order, levels, sides if zero else sides[:1], "minmax" if zero else "absmax")
    return FormCodec(replace(made, limit=limit), transform)


@dataclass(frozen=True, kw_only=True)
class Integer(Method):
    """Round to nearest integers of 2 to 8 bits, per token in groups of channels.

    Parameters
    ----------
    bits : int
        2 to 8.
    group : int
        Channels that share a scale, at most all of a vector.
    zero : bool
        Store a zero point, too, so that the codes span the range from minimum to maximum.
    rotate : bool
        Rotate the vectors at random before they are rounded.
    seed : int
        Chooses the rotation's signs; must be 0 without a rotation.

    Examples
    --------
    >>> codec = make_codec(Integer(bits=4), False, 8, torch.float32)
    >>> codes = codec.encode(torch.tensor([[[[-7.0, -4, -2, -1, 0, 1, 3, 8]]]]))
    >>> {name: x.flatten().tolist() for name, x in codes.items()}
    {'codes': [15, 12, 10, 9, 8, 7, 5, 0], 'scale': [-1.0]}
    """

    name: ClassVar[str] = "int"
    added: ClassVar[tuple[str, ...]] = ("rotate", "seed")
    examples: ClassVar[Mapping[str, float]] = {
        "int:bits=4": 0.108,
        "int:bits=8": 0.0067,
        "int:bits=5,window=3": 0.055,
        "int:bits=4,group=1024,zero=true,rotate=true": 0.13,
    }
    variants: ClassVar[Mapping[str, float]] = {
        "int:bits=2": 0.42,
        "int:bits=3": 0.19,
        "int:bits=7,group=64,sinks=0": 0.02,
        "int:bits=4,zero=true": 0.09,
        "int:bits=4,group=1024,rotate=true": 0.135,
        "int:bits=8,rotate=true,seed=-3": 0.0067,
    }
    bits: int = 8
    group: int = 32
    zero: bool = False
    rotate: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_choice("bits", range(2, 9))
        self.check("group", self.group >= 1, "at least 1")
        self.check("seed", self.rotate or not self.seed, "left out, or with rotate=true")

    def codec(self, dim: int, dtype: torch.dtype, order: Order) -> Codec:
        """Return the codec for keys or for values."""
        transform = RandomHadamard(dim, self.seed) if self.rotate else IDENTITY
        return integers(dim, self.bits, self.group, self.zero, order, transform)
