"""Principal components of all heads of a layer, trellis-coded: 1 to 2 bits, calibrated.

For what is stored rather than attended to at every step: prefixes, snapshots, cold pages. After
KVTC (arXiv:2511.01815), with a trellis in the place of scalar quantisers, weights, and two means.

Of one layer, x is the C = H_kv D numbers of a token, keys as they are before RoPE:

    z = w (x - m)          m: one of two means, or nothing; w: weight of each channel
    y = U^T z / s          U, s: eigenvectors and deviations of z, the largest first
    y ~ n level            n: a scale of 8 bits; codes of one trellis (TCQ)
    x ~ m + U (n level s) / w

m and n are those of which the least error is expected, from what lies beyond the largest level and
between levels: a token unlike the calibration texts has few large components, which a scale of
their root mean square would cut off. Component i has k_i bits, given one by one to the component
where a bit takes off most error, `s_i^2 (D(k_i) - D(k_i + 1))`; those without any are zero. In the
trellis an error counts `s_i^2`.

Learnt from calibration tokens (`kvpact calibrate`), where keys, values and queries are known:

- The means are of ordinary tokens, and of those whose value is small (norm below .45 of the
  median): attention sinks inside the text, whose keys are alike.
- w of K is the root of the queries' energy in each RoPE pair, of V the root of what the output
  projection makes of each channel; each relative to its mean over the heads, .05 at least.
- 1 % of the variance of each channel is added to the covariance, so that no component is nothing.

Without calibration a codec learns from what it encodes first: no weights, one mean, no RoPE.

V has a quarter more bits than that, K a quarter less: at equal bits V's error is most of the
damage (four fifths on SmolLM2 at 2 bits).

Bits per value: `bits`, all included (8 of the scale and 2 of the flag for each token and layer), if
`2 bits D` is whole bytes; else the next lower number of bytes. The state has C^2 numbers of 16 bits
for each of K and V.
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
        Bits per value, 0.5 to 6, of K and V on average; side information is counted.
    lean : float
        What V has more than that, and K less, as a share of it, 0 to 0.9.
    states : {8, 16}
        Of the trellis.
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
