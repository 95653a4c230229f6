"""The cost of errors of stored K and V in KL, to second order, from gradients on one text.

With `p` the exact distribution of a next token and `J` the derivative of its logits with respect to
the stored K and V, an error `d` of these costs `1/2 d' J' (diag p - p p') J d`. A random vector
`r = sqrt(p) x - p (sqrt(p) . x)`, with `x` standard normal, has the covariance `diag p - p p'`. So
a backward pass of `r . logits`, with an `x` for each token, gives gradients `g`, and the mean of
`1/2 (g . d)^2` is the KL summed over the tokens.

Errors of unlike layers and heads are nearly independent, and so are the errors of V of unlike
tokens. So `g . d` is squared head by head for K, and token by token for V; the sum of the squares
is what the *noise* of a layer's K or V costs, and such sums add. (Errors of K of one head may work
in the same direction at all its tokens: weights that are too even, for instance.)

One part of the errors of V is common to all: codes of least square error are shorter than what
they stand for, by a share `a`, so that the outputs of all layers shrink. That costs
`(sum over layers of a w)^2`. `(sum of w)^2` is measured by passes whose stored V are shorter in all
layers, and is shared among the layers as the gradients along V tell.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from kvpact.integrations.transformers.attention.seen import Seen

SINKS, WINDOW = 4, 64
"""First tokens, and last ones before a chunk, that are exact, as the candidates have it."""


@dataclass(frozen=True)
class Sensitivity:
    """The effect of errors on a model, on one text.

    Parameters
    ----------
    seen : Seen
        Queries, K and V of all T tokens.
    key, value : mapping
        Layer -> gradients of each chunk but the first, bf16 ``[draws, H_kv, t, D]``, with respect
        to the `t` tokens after the sinks that were stored as codes.
    shrinkage : mapping
        Layer -> `w` of V, in the root of nats.
    scored : int
        Tokens whose logits the gradients are of.
    """

    seen: Seen
    key: Mapping[int, Sequence[Tensor]]
    value: Mapping[int, Sequence[Tensor]]
    shrinkage: Mapping[int, float]
    scored: int

    def noise(self, layer: int, side: str, coded: Tensor) -> Tensor:
        """Return what the errors of one layer's coded K or V cost one by one, in nats per token.

        `side`: ``key`` or ``value``; `coded`: ``[1, H_kv, T, D]``, as a cache holds them. Returns
        ``[2, draws]``: the cost, and what it would be if each token's error in a channel had the
        mean square of all tokens of its head. The latter compares specs on one layer: it varies
        far less between draws, but leaves out how unlike tokens are.
        """
        seen = self.seen.layers[layer]
        error = (coded.float() - (seen.k if side == "key" else seen.v).float())[:, :, SINKS:]
        mean_square = error.square().mean(2)[0]
        found: list[Tensor] = []
        for gradients in getattr(self, side)[layer]:
            scores = (gradients * error[:, :, : gradients.shape[2]]).sum(-1)
            if side == "key":
                scores = scores.sum(2)
            cost = scores.square().flatten(1).sum(1)
            expected = (gradients.float().square().sum(2) * mean_square).sum((1, 2))
            found.append(torch.stack([cost, expected]))
        return torch.stack(found).sum(0) / (2 * self.scored)

    def shrunk(self, layer: int, coded: Tensor) -> float:
        """Return `a w` of one layer's coded V, ``[1, H_kv, T, D_v]``, in the root of nats."""
        exact = self.seen.layers[layer].v[:, :, SINKS:].float()
        error = coded[:, :, SINKS:].float() - exact
        share = -(error * exact).sum() / exact.square().sum().clamp(min=1e-30)
        return float(share) * self.shrinkage[layer]
