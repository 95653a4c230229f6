"""What coded keys and values change in one layer's attention, from one pass and no KL run.

For keys, with `p` the exact attention weights of a query and `d` the errors of its logits:
`S = 1/2 Var_p(d)`. To second order that is the KL divergence between the exact attention weights
and those with coded keys, so an error that moves all logits alike counts for nothing, and one on a
key that nobody attends to for little. For values: the mean square error of the attention output
under the exact weights, relative to its energy.

Both are means over heads and the queries of the second half. Keys and values that a cache holds
exactly, its first tokens and a query's most recent ones, have no error.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from kvpact.integrations.transformers.record import SeenLayer

SINKS, WINDOW = 4, 64
"""First and last tokens that are exact: what the candidates have by default."""


class ExactAttention:
    """The attention of one layer, to which coded keys and values are compared.

    Parameters
    ----------
    seen : SeenLayer
        What the layer was given, of T tokens.
    sinks, window : int
        First tokens, and a query's most recent ones, that are held exactly.
    """

    def __init__(self, seen: SeenLayer, sinks: int = SINKS, window: int = WINDOW) -> None:
        tokens = seen.k.shape[2]
        self._seen, self._groups = seen, seen.q.shape[1] // seen.k.shape[1]
        self._queries = seen.q[:, :, tokens // 2 :].float() * seen.scale
        key = torch.arange(tokens, device=seen.k.device)
        query = key[tokens // 2 :, None]
        self._coded = (key >= sinks) & (key <= query - window)
        self._logits = self._logits_of(seen.k)
        logits = self._logits.masked_fill(key > query, -torch.inf)
        if seen.sink_logits is not None:
            extra = seen.sink_logits.float().view(1, -1, 1, 1).expand(*logits.shape[:3], 1)
            logits = torch.cat([logits, extra], -1)
        self._weights = logits.softmax(-1)[..., :tokens]
        self._energy = self._attended(seen.v.float()).square().mean()

    def _whole(self, x: Tensor) -> Tensor:
        return x.float().repeat_interleave(self._groups, 1)

    def _logits_of(self, keys: Tensor) -> Tensor:
        logits = self._queries @ self._whole(keys).mT
        cap = self._seen.softcap
        return logits if cap is None else cap * (logits / cap).tanh()

    def _attended(self, values: Tensor) -> Tensor:
        return self._weights @ self._whole(values)

    def key_statistic(self, keys: Tensor) -> float:
        """Return S of coded keys, `[1, H_kv, T, D]`: nats of attention, 0 for exact ones."""
        error = (self._logits_of(keys) - self._logits).masked_fill(~self._coded, 0.0)
        mean = (self._weights * error).sum(-1)
        variance = (self._weights * error.square()).sum(-1) - mean.square()
        return float(variance.clamp(min=0).mean() / 2)

    def value_error(self, values: Tensor) -> float:
        """Return the output's relative mean square error with coded values `[1, H_kv, T, D_v]`."""
        error = self._whole(values) - self._whole(self._seen.v)
        weights = self._weights.masked_fill(~self._coded, 0.0)
        return float((weights @ error).square().mean() / self._energy.clamp(min=1e-30))
