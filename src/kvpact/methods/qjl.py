"""QJL: signs of a projection for K (Zandieh, Daliri, Han, arXiv:2406.03482).

K: the signs of `S x`, `sketch D` of them, and the norm of x. S consists of `sketch` orthonormal
`D x D` blocks, as in section 4.2 of the paper (with its Gaussian S the variance is 2.8 times as
large), and

    x ~ sqrt(pi / (2 D)) |x| S^T sign(S x) / sketch

so that the inner product with any exact q is right on average. In softmax attention that is not
what counts: at equal bits a codebook (`turboquant`) has far less distortion.

A block is a Hadamard transform with random signs after another one: after a single one, a key that
lies in one channel would have coordinates of equal magnitude, and an estimate 25 % too long.
Instead of the norm fp16 holds the root mean square, `|x| / sqrt(D)`, which reaches further.

V: per token, asymmetric integers in groups of channels, which the paper takes over from KIVI. The
paper's separate sketch for outlier channels of K is not built. Bits per value: sketch + 16/D for K,
value_bits + 32/value_group for V. The defaults are the paper's settings for D = 128; its 128 exact
tokens are ``window=128``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kvpact.arithmetic import divide, square_root, tree_sum
from kvpact.formats import CodesField, TokenField
from kvpact.methods.base import Arrays, Codec, Method
from kvpact.methods.integer import integers
from kvpact.quantizers.numbers import half
from kvpact.transforms import RandomHadamard


@dataclass(frozen=True)
class DoubleHadamard:
    """Two random Hadamard transforms, one after the other."""

    first: RandomHadamard
    second: RandomHadamard

    def forward(self, x: Tensor) -> Tensor:
        """Rotate `[..., dim]`; computed in fp32."""
        return self.second.forward(self.first.forward(x))

    def inverse(self, y: Tensor) -> Tensor:
        """Rotate back."""
        return self.first.inverse(self.second.inverse(y))


class SignCodec(Codec):
    """Keys; the first block of the sketch is the transform, and the others follow it."""

    def __init__(self, dim: int, sketch: int, seed: int = 0) -> None:
        self._sketch, self._seed = sketch, seed
        self.transform = DoubleHadamard(RandomHadamard(dim, seed), RandomHadamard(dim, seed + 1))
        self._further = [RandomHadamard(dim, seed + 1 + block) for block in range(1, sketch)]
        self.fields = (CodesField("signs", 1, sketch * dim, "token"), TokenField("scale", 1))

    def encode(self, x: Tensor, frozen: Arrays | None = None) -> dict[str, Tensor]:
        """Project, keep the signs."""
        y = self.transform.forward(x)
        blocks = torch.cat([y, *(block.forward(y) for block in self._further)], dim=-1)
        size = divide(square_root(tree_sum(y.square())), math.sqrt(y.shape[-1]))
        return {"signs": (blocks > 0).to(torch.uint8), "scale": half(size, "size of a token")}

    def decode(self, arrays: Arrays) -> Tensor:
        """Return the mean of the blocks' estimates, in the space of the first block."""
        # Block by block, so that only one is there as numbers.
        first, *others = arrays["signs"].chunk(self._sketch, dim=-1)
        estimate = first.to(torch.float32) * 2 - 1
        for block, signs in zip(self._further, others, strict=True):
            estimate = estimate + block.inverse(signs.to(torch.float32) * 2 - 1)
        factor = math.sqrt(math.pi / 2) / self._sketch
        return estimate * (arrays["scale"].to(torch.float32) * factor)


@dataclass(frozen=True, kw_only=True)
class QJL(Method):
    """Keys as signs of a random projection, values as integers per token.

    Parameters
    ----------
    sketch : {1, 2, 3, 4}
        Signs per channel of K.
    value_bits : int
        Bits of V, 2 to 8.
    value_group : {32, 64, 128}
        Channels of V that share a scale and a zero.
    seed : int
        Chooses the projection of K.

    Examples
    --------
    >>> codec = make_codec(QJL(), True, 8, torch.float32)
    >>> codes = codec.encode(torch.tensor([[[[-7.0, -4, -2, -1, 0, 1, 3, 8]]]]))
    >>> {name: x.flatten().tolist() for name, x in codes.items()}
    {'signs': [0, 0, 1, 0, 1, 0, 1, 1, 1, 0, 1, 0, 1, 1, 0, 1], 'scale': [4.2421875]}
    """

    name: ClassVar[str] = "qjl"
    paper: ClassVar[str] = "arXiv:2406.03482"
    key_only: ClassVar[tuple[str, ...]] = ("sketch", "seed")
    examples: ClassVar[Mapping[str, float]] = {"qjl": 0.55}
    variants: ClassVar[Mapping[str, float]] = {
        "qjl:sketch=3,sinks=0,window=0/qjl:value_bits=4": 0.45
    }
    sketch: int = 2
    value_bits: int = 2
    value_group: int = 32
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_choice("sketch", range(1, 5))
        self.check_choice("value_bits", range(2, 9))
        self.check_choice("value_group", (32, 64, 128))

    def key_codec(self, dim: int, dtype: torch.dtype) -> Codec:
        """Return the codec for keys."""
        return SignCodec(dim, self.sketch, self.seed)

    def value_codec(self, dim: int, dtype: torch.dtype) -> Codec:
        """Return the codec for values."""
        return integers(dim, self.value_bits, self.value_group, True, "channel")
