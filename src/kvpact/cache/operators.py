"""Calls of a cache as operators of torch, so that `torch.compile` meets no graph break at them.

An operator is opaque: what compiles a model knows the shape of its result and that it has effects,
and calls it as it is. Caches are named by numbers, because operators take tensors and numbers.
"""

from __future__ import annotations

from itertools import count
from typing import TYPE_CHECKING
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from torch._higher_order_ops.effects import _EffectType, _register_effectful_op

from kvpact.contract import AttendConfig
from kvpact.errors import KVPactError

if TYPE_CHECKING:
    from kvpact.cache.protocol import EngineCache

_numbers = count(1)
_caches: WeakValueDictionary[int, EngineCache] = WeakValueDictionary()


def operator_number(cache: EngineCache) -> int:
    """Return the number by which operators know a cache; it lives no longer for that."""
    for number, known in list(_caches.items()):
        if known is cache:
            return number
    number = next(_numbers)
    _caches[number] = cache
    return number


@torch.library.custom_op("kvpact::attend", mutates_args=())
def attend(
    cache: int,
    layer: int,
    k: Tensor,
    v: Tensor,
    q: Tensor,
    softmax_scale: float | None = None,
    softcap: float | None = None,
    sliding_window: int | None = None,
    is_causal: bool = True,
    mask: Tensor | None = None,
    sink_logits: Tensor | None = None,
) -> Tensor:
    """Store new tokens and attend as `EngineCache.attend` does, by ``torch.ops.kvpact.attend``."""
    known = _caches.get(cache)
    if known is None:
        raise KVPactError(f"operator call for cache {cache}, which is gone; keep a reference to it")
    config = AttendConfig(
        softmax_scale=softmax_scale,
        softcap=softcap,
        sliding_window=sliding_window,
        is_causal=is_causal,
        mask=mask,
        sink_logits=sink_logits,
    )
    return known.attend(layer, k=k, v=v, q=q, config=config).contiguous()


@attend.register_fake
def _(
    cache: int, layer: int, k: Tensor, v: Tensor, q: Tensor, *rules: object, **named: object
) -> Tensor:
    geometry = getattr(_caches.get(cache), "geometry", None)
    latent = geometry is not None and geometry.latent
    return q.new_empty(*q.shape[:3], (k if latent else v).shape[3])


# Calls take turns as they stand in the program, and none is left out.
_register_effectful_op(torch.ops.kvpact.attend.default, _EffectType.ORDERED)
