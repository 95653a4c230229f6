"""TurboQuant (Zandieh, Daliri, Hadian, Mirrokni, arXiv:2504.19874), with options beyond the paper.

mse (Algorithm 1): rotate, `y = R x`, normalise, round every coordinate to the nearest level `c` of
a codebook of N(0, 1); `x ~ R^T (s c)`. Up to 6 bits `c = u k`, where k is a whole number of 8 bits
and u the codebook's unit, so that products of codes are exact in 8-bit integers. The distortion is
.3634, .1175, .03455, .009506, .002519, .000657 for 1 to 6 bits: at most .055 % above that of the
paper's Lloyd-Max levels up to 4 bits, .58 and 1.9 % at 5 and 6. At 7 and 8 bits the levels are the
Lloyd-Max ones (.0001635, .0000412; see `kvpact.quantizers.codebooks`). The fp16 scale `s`, with
`n = |y|` and width D:

- ``ls`` (default): `<c, y> / |c|^2`, the least-squares scale, which has the least distortion.
- ``l2``: `n / sqrt(D)`, the paper's.
- ``unbiased``: `n^2 / <c, y>`, with which inner products are right on average (EDEN); for
  retrieval. In softmax attention the shrinkage of ``ls`` is better.

prod (Algorithm 2, K only): mse with one bit less, then QJL of the residual `r = y - s c`: the signs
of a second rotation, `S r`, and the norm g of r in fp16;
`x ~ R^T (s c + sqrt(pi / (2 D)) g S^T sign(S r))`. S is orthonormal (a Hadamard transform with its
own signs); with the paper's Gaussian matrix the variance would be 2.8 times as large.

center (K only): the mean of each channel over a tile of 64 or 128 tokens is subtracted before the
codebook is applied, and stored, rotated, in fp16: `y ~ m + s c`. Keep exact first tokens (`sinks`)
with it: they are outliers of their tile and would shift its mean.

first (K only, not with prod): each token chooses by a flag what is subtracted: the mean of its tile
(with center; of 8 bits), the first key of the sequence, or nothing (see `kvpact.methods.bases`).
The first key is learnt from the cache's first tokens and kept until it is reset.

Bits per value: bits + 16/D; prod 16/D more; center 16/center more; first 2/D more, and together
with center 8/center + 16/(center D) instead of 16/center; the learnt first key comes on top. The
paper's quantiser is ``scale=l2``; its separate treatment of outlier channels is not built.

Version 2: levels of whole numbers. (Version 1 had Lloyd-Max levels at all bits.)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch

from kvpact.methods.base import Codec, Method
from kvpact.methods.turboquant_codec import TurboQuantCodec, TurboQuantKeyCodec


@dataclass(frozen=True, kw_only=True)
class TurboQuant(Method):
    """Random rotation, then a codebook of N(0, 1) and one scale per vector.

    Parameters
    ----------
    bits : int
        Bits per coordinate, 1 to 8; with ``mode=prod`` at least 2, QJL's bit included.
    mode : {"mse", "prod"}
        ``prod`` spends one bit of K on QJL (V stays mse).
    scale : {"ls", "l2", "unbiased"}
        How the scale is chosen: least squares, the norm, or right on average.
    center : {0, 64, 128}
        Tokens of a tile whose mean is subtracted from K; 0 for none.
    first : bool
        Whether each token of K chooses what is subtracted: its tile's mean, the first key of the
        sequence, or nothing.
    seed : int
        Chooses the rotation's signs.
    """

    name: ClassVar[str] = "turboquant"
    version: ClassVar[int] = 2
    paper: ClassVar[str] = "arXiv:2504.19874"
    key_only: ClassVar[tuple[str, ...]] = ("mode", "center", "first")
    learnt_by: ClassVar[tuple[str, ...] | None] = ("first", "seed")
    added: ClassVar[tuple[str, ...]] = ("first",)
    examples: ClassVar[Mapping[str, float]] = {
        "turboquant:bits=4": 0.101,
        "turboquant:bits=3,center=64": 0.192,
        "turboquant:bits=3,sinks=0,window=0": 0.195,
        "turboquant:bits=4,mode=prod": 0.145,
        "turboquant:bits=3,mode=prod,center=64,sinks=0,window=0": 0.27,
        "turboquant:bits=3,center=64,first=true": 0.192,
    }
    variants: ClassVar[Mapping[str, float]] = {
        "turboquant:bits=1": 0.615,
        "turboquant:bits=2": 0.355,
        "turboquant:bits=8,scale=unbiased": 0.0068,
        "turboquant:bits=2,center=128": 0.355,
        "turboquant:bits=2,first=true,scale=unbiased": 0.38,
    }
    bits: int = 4
    mode: str = "mse"
    scale: str = "ls"
    center: int = 0
    first: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_choice("mode", ("mse", "prod"))
        self.check_choice("bits", range(2 if self.mode == "prod" else 1, 9))
        self.check_choice("scale", ("ls", "l2", "unbiased"))
        self.check_choice("center", (0, 64, 128))
        self.check("first", not self.first or self.mode == "mse", "false with mode=prod")

    def key_codec(self, dim: int, dtype: torch.dtype) -> Codec:
        """Return the codec for keys."""
        if self.first:
            return TurboQuantKeyCodec(dim, self.bits, self.scale, self.center, self.seed)
        signs = self.mode == "prod"
        return TurboQuantCodec(dim, self.bits, self.scale, "token", self.center, signs, self.seed)

    def value_codec(self, dim: int, dtype: torch.dtype) -> Codec:
        """Return the codec for values."""
        return TurboQuantCodec(dim, self.bits, self.scale, "channel", seed=self.seed)
