"""An exact cache of a model's first and most recent tokens, the baseline without a codec."""

from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from kvpact.integrations.transformers.versions import PreTrainedConfig

SINKS = 4  # first tokens that are kept


class RecentLayer(DynamicSlidingWindowLayer):  # type: ignore[no-untyped-call]
    """Exact tokens of a layer, at most so many, the first and the last; positions count all."""

    is_sliding = False  # no mask hides what is held

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Append tokens, then drop surplus ones; return K and V as the call sees them."""
        k, v = super().update(key_states, value_states)
        last = self.sliding_window - 1 - SINKS
        if k.shape[2] > last + SINKS:
            both = ((x[:, :, :SINKS], x[:, :, -last:]) for x in (k, v))
            self.keys, self.values = (torch.cat(parts, 2) for parts in both)
        return k, v


def recent_cache(config: PreTrainedConfig, most: int) -> DynamicCache:
    """Return a cache whose layers with full attention hold at most so many tokens each."""
    cache = DynamicCache(config=config)
    cache.layers = [RecentLayer(most + 1) if type(x) is DynamicLayer else x for x in cache.layers]
    return cache
