"""An exact cache of a model's first and most recent tokens: what a bound without a codec leaves."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedConfig
from transformers.cache_utils import DynamicLayer

SINKS = 4
"""First tokens that are kept."""


class RecentLayer(DynamicLayer):  # type: ignore[no-untyped-call]
    """Exact tokens of a layer, at most so many: the first ones and the most recent ones.

    Positions go on to count all tokens. A call's own tokens see one another, and all that is held.
    """

    def __init__(self, most: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.most, self.seen = most, 0

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Append tokens, then let go of what is too much; return K and V as the call sees them."""
        k, v = super().update(key_states, value_states)
        self.seen += key_states.shape[2]
        if k.shape[2] > self.most:
            last = self.most - SINKS
            both = ([x[:, :, :SINKS], x[:, :, x.shape[2] - last :]] for x in (k, v))
            self.keys, self.values = (torch.cat(parts, 2) for parts in both)
        return k, v

    def get_seq_length(self) -> int:
        """Return how many tokens came: what positions are counted from."""
        return self.seen

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return the length of the keys that the next update returns, and where they seem to be."""
        held = 0 if self.keys is None else self.keys.shape[2]
        return held + query_length, self.seen - held


def recent_cache(config: PreTrainedConfig, most: int) -> DynamicCache:
    """Return a cache whose layers with full attention hold at most so many tokens each."""
    cache = DynamicCache(config=config)
    cache.layers = [RecentLayer(most) if type(x) is DynamicLayer else x for x in cache.layers]
    return cache
