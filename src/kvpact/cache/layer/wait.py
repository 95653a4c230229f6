"""First tokens that an engine keeps by itself before a layer stores them."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from kvpact.cache.layer.layer import CacheLayer
from kvpact.cache.stream.stream import Stream
from kvpact.kernels import largest
from kvpact.quantizers.numbers import HALF_MAX


class Wait(NamedTuple):
    """The first tokens of a layer that an engine may keep itself, exact, before it stores them.

    None of them is packed then. Tokens with numbers below `k_limit` and `v_limit` can surely be
    stored; with `deferred` storing them is soon enough to look.
    """

    tokens: int
    dtype: torch.dtype
    k_limit: float
    v_limit: float
    deferred: bool

    @classmethod
    def of(cls, layer: CacheLayer, k: Tensor, v: Tensor) -> Wait:
        """Return it for a layer that is to hold tokens like `k` and `v` `[B, H_kv, T, D]`."""
        streams = key, value = layer.new_stream(k, True), layer.new_stream(v, False)
        tokens = min(
            s.room_before(0) if s.codec.ready or not s.codec.learns_from else s.learning[0]
            for s in streams
        )
        return cls(tokens, k.dtype, _limit(key), _limit(value), layer.compute.deferred)

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


def _limit(stream: Stream) -> float:
    codec, limit = stream.codec, stream.plan.limit
    root = math.sqrt(stream.memory.tensor.shape[3] or 1)
    least = min(codec.max_abs, codec.max_norm) / root
    if codec.group > 1:
        return least
    return min(least, HALF_MAX / root if limit is None else limit)
