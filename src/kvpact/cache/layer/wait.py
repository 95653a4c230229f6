"""First tokens that an engine keeps by itself before a layer stores them."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from kvpact.cache.layer.layer import CacheLayer
from kvpact.kernels import largest, surely_stored


class Wait(NamedTuple):
    """The first tokens of a layer that an engine may keep itself, exact, before it stores them.

    Those below `k_limit` and `v_limit` can surely be stored; with `deferred` nobody looks before.
    """

    tokens: int
    dtype: torch.dtype
    k_limit: float
    v_limit: float
    deferred: bool

    @classmethod
    def of(cls, layer: CacheLayer, k: Tensor, v: Tensor) -> Wait:
        """Return it for a layer that is to hold tokens like `k` and `v` `[B, H_kv, T, D]`."""
        streams = layer.new_stream(k, True), layer.new_stream(v, False)
        tokens = min(
            s.room_before(0) if s.codec.ready or not s.codec.learns_from else s.learning[0]
            for s in streams
        )
        k_limit = surely_stored(streams[0].plan, k.shape[3])
        v_limit = surely_stored(streams[1].plan, v.shape[3])
        return cls(tokens, k.dtype, k_limit, v_limit, layer.compute.deferred)

    def holds(self, held: int, k: Tensor, v: Tensor) -> bool:
        """Return whether new tokens of a call may wait along with `held` that do."""
        new = k.shape[2]
        if held + new > self.tokens or v.shape[2] != new or not k.dtype is v.dtype is self.dtype:
            return False
        return not (torch.is_grad_enabled() and (k.requires_grad or v.requires_grad))

    def fits(self, k: Tensor, v: Tensor) -> bool:
        """Return whether tokens can surely be stored later, by their numbers."""
        if self.deferred or not k.shape[2]:
            return True
        k_size, v_size = largest(k, v)
        return k_size < self.k_limit and v_size < self.v_limit
