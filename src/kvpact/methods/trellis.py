"""Trellis-coded quantisation (TCQ) of rotated vectors.

The trellis is that of Marcellin and Fischer (IEEE Trans. Commun. 38, 1990), tail-biting, with
Ungerboeck's codes of 8 or 16 states.

V: rotate, `y = R x`; the scale n is the root mean square of y, rounded to 8 bits (5 of exponent, 3
of mantissa); the trellis finds the codes of `y / n` (`quantizers.trellis`); `x ~ R^T (n level)`.

K takes further steps by default, each of which can be switched off:

- ``center`` and ``first``: what is subtracted first, the *base*, is chosen for each token by a
  flag: the mean of its tile, the first key of the sequence, or nothing, whichever is nearest.
  Attention sinks inside the text resemble the first key and are far from the mean; they draw so
  much attention that their errors do most of the damage. The mean has 8 bits for each channel and
  is taken over the tokens that are nearest to it. ``first=false`` leaves out the first key,
  ``center=0`` the mean.
- ``weights``: channels are multiplied by `w = (E_q / E_k)^(1/4)`, and queries divided by it, where
  `E_q` and `E_k` are the mean squares of queries and of keys less their base. Of all weights before
  a rotation these give the least error of inner products. Without queries, `w = E_k^(-1/4)`.
- ``blocks``: channels are sorted by `E_q E_k`; the first quarter gets bits + 1, the last quarter
  bits - 1. Each block has its own rotation, deviation and trellis; the scale is common. A quarter
  is rounded down to a multiple of 16 channels. At 6 bits, and at widths below 64 or that are no
  multiple of 16, there is one block.

`w`, the order, the deviations and the first key are the codec's *state*, learnt from the first 64
tokens of the cache (128 with ``center=128``) and kept until it is reset.

Bits per value of K: bits + 8/D for the scale, 8/center + 16/(center D) for the mean and 2/D for the
flag; of V: bits + 8/D. The state comes on top: 6 D bytes and a deviation per block for each head of
K.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch

from kvpact.methods.base import Codec
from kvpact.methods.fitted import FittedMethod
from kvpact.methods.trellis_codec import TrellisCodec
from kvpact.methods.trellis_learning import TreatedKeys, TrellisKeyCodec
from kvpact.quantizers.trellis import STATES


@dataclass(frozen=True, kw_only=True)
class Trellis(FittedMethod):
    """Rotation, then trellis-coded quantisation; K with a base, channel weights and sorted blocks.

    Parameters
    ----------
    bits : int
        Bits per coordinate, 1 to 6.
    states : {8, 16}
        States of the trellis; more of them cost time in encoding alone.
    center : {0, 64, 128}
        Tokens of a tile whose mean is a base of K; 0 for no mean.
    first : bool
        Whether the first key of the sequence is a base of K.
    weights : bool
        Whether channels of K are weighted by the energies of queries and keys.
    blocks : bool
        Whether channels of K are sorted into blocks of different bits.
    seed : int
        Chooses the rotations' signs.

    Examples
    --------
    >>> codec = make_codec(Trellis(bits=4), False, 8, torch.float32)
    >>> codes = codec.encode(torch.tensor([[[[-7.0, -4, -2, -1, 0, 1, 3, 8]]]]))
    >>> {name: x.flatten().tolist() for name, x in codes.items()}
    {'codes': [10, 3, 3, 5, 3, 6, 8, 3], 'scale': [144]}
    """

    name: ClassVar[str] = "trellis"
    paper: ClassVar[str] = "Marcellin and Fischer (1990), doi:10.1109/26.46532"
    key_only: ClassVar[tuple[str, ...]] = ("center", "first", "weights", "blocks")
    examples: ClassVar[Mapping[str, float]] = {
        "trellis:bits=4,center=0,first=false,weights=false,blocks=false": 0.084,
        "trellis:bits=3": 0.19,
    }
    variants: ClassVar[Mapping[str, float]] = {
        "trellis:bits=2,states=8,weights=false,blocks=false,first=false": 0.305
    }
    learnt_by: ClassVar[tuple[str, ...] | None] = key_only
    bits: int = 4
    states: int = 16
    center: int = 64
    first: bool = True
    weights: bool = True
    blocks: bool = True
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_choice("bits", range(1, 7))
        self.check_choice("states", STATES)
        self.check_choice("center", (0, 64, 128))

    def key_codec(self, dim: int, dtype: torch.dtype) -> Codec:
        """Return the codec for keys."""
        if not (self.center or self.first or self.weights or self.blocks):
            return TrellisCodec(dim, self.bits, self.states, "token", self.seed)
        learns = self.first or self.weights or self.blocks
        options = {name: getattr(self, name) for name in self.key_only}
        kind = TrellisKeyCodec if learns else TreatedKeys
        return kind(dim, self.bits, self.states, seed=self.seed, **options)

    def value_codec(self, dim: int, dtype: torch.dtype) -> Codec:
        """Return the codec for values."""
        return TrellisCodec(dim, self.bits, self.states, "channel", self.seed)
