"""Principal components of all heads of a layer, trellis-coded: few bits, with a calibration.

For what is stored rather than attended to at every step: prefixes, snapshots, cold pages. After
KVTC (arXiv:2511.01815), with a trellis in place of scalar quantisers, with weights, and with two
means.

In one layer, x is the C = H_kv D numbers of a token, keys as they are before RoPE:

    z = w (x - m)          m: one of two means, or nothing; w: weight of each channel
    y = U^T z / s          U, s: eigenvectors and deviations of z, the largest first
    y ~ n level            n: a scale of 8 bits; codes of one trellis (TCQ)
    x ~ m + U (n level s) / w

For each token, m and n are chosen for the least expected error. This counts what lies beyond the
largest level and what lies between levels: a token unlike the calibration texts has few large
components, which a scale of their root mean square would cut off. Component i has k_i bits. Bits
are given one by one, each to the component where it takes off most error,
`s_i^2 (D(k_i) - D(k_i + 1))`, where D(k) is the distortion at k bits; components without bits are
zero. The trellis weighs the error of component i by `s_i^2`.

What is learnt from calibration tokens (`kvpact calibrate`), where keys, values and queries are
known:

- Two means: that of ordinary tokens, and that of tokens whose value is small (norm below .45 of the
  median). The latter are attention sinks inside the text, whose keys are much the same.
- The weights w: for K the root of the queries' energy in each RoPE pair, for V the root of the
  energy that the output projection makes of each channel. Both are relative to their root mean
  square over all channels of all heads, and at least .05.
- The components: 1 % of each channel's variance is added to the covariance, so that no component
  vanishes.

Without calibration a codec learns from what it encodes first: no weights, one mean, and keys as
they are after RoPE.

V gets more bits than K because at equal bits its error does most of the damage: by default
(``lean=0.25``) a quarter more than `bits`, and K a quarter less.

Bits per value, K and V on average: `bits`, with all that is stored of a token (8 bits of scale and
2 of flag per token and layer), rounded down to whole bytes of K and V together per head. The state
comes on top: C^2 numbers of 16 bits and a few of each channel, once for K and once for V of a
layer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch

from kvpact.methods.base import Codec
from kvpact.methods.fitted import FittedMethod
from kvpact.methods.pca_codec import LEAST_BYTES, MOST_BITS, PcaCodec
from kvpact.quantizers.trellis import STATES


@dataclass(frozen=True, kw_only=True)
class PCA(FittedMethod):
    """Principal components of all heads together, with bits by their variance.

    Parameters
    ----------
    bits : float
        Bits per value, 0.5 to 6, of K and V on average, side information included.
    lean : float
        Share of `bits` that V has more, and K less, 0 to 0.9.
    states : {8, 16}
        States of the trellis.
    """

    name: ClassVar[str] = "pca"
    paper: ClassVar[str] = "arXiv:2511.01815"
    examples: ClassVar[Mapping[str, float]] = {"pca:bits=2": 0.75}
    variants: ClassVar[Mapping[str, float]] = {
        "pca:bits=4.5,states=8": 0.4,
        "pca:bits=0.5,sinks=0,window=0": 1.0,
    }
    learnt_by: ClassVar[tuple[str, ...] | None] = ()
    bits: float = 2.0
    lean: float = 0.25
    states: int = 16

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check("bits", 0.5 <= self.bits <= 6, "a number from 0.5 to 6")
        self.check("lean", 0 <= self.lean <= 0.9, "a number from 0 to 0.9")
        self.check_choice("states", STATES)

    def key_codec(self, dim: int, dtype: torch.dtype) -> Codec:
        """Return a codec for keys, not fitted yet."""
        return PcaCodec(dim, self._bytes(dim)[0], self.states, key=True)

    def value_codec(self, dim: int, dtype: torch.dtype) -> Codec:
        """Return a codec for values, not fitted yet."""
        return PcaCodec(dim, self._bytes(dim)[1], self.states, key=False)

    def _bytes(self, dim: int) -> tuple[int, int]:
        """Return the bytes of a token and head of K and V, for a width."""
        both = int(2 * self.bits * dim / 8 + 1e-9)
        k = round(self.bits * dim / 8 * (1 - self.lean))
        # More than 6 bits a component would be bytes of nothing.
        k = max(k, both - (MOST_BITS * dim // 8 + 1))
        return max(k, LEAST_BYTES), max(both - k, LEAST_BYTES)
