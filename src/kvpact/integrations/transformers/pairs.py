"""What keeps the self-attention and the cross-attention of a model out of one and the same cache.

Decoders with cross-attention want an `EncoderDecoderCache`, a cache for each. Given a single one,
most of their code writes both into it, layer by layer, and goes on with wrong tokens in silence.
"""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any, NamedTuple
from weakref import ref

from torch import nn
from transformers.cache_utils import CacheLayerMixin

from kvpact.cache.room import Moment
from kvpact.errors import GeometryError
from kvpact.integrations.transformers.layer import CompressedLayer

REMEDY = (
    "this model's cross-attention wants a cache of its own: pass past_key_values="
    "EncoderDecoderCache(CompressedCache(model, spec), DynamicCache(config=model.config)), or none "
    "after enable(model, spec)"
)
_INTERRUPTED = (
    "a call before this one was interrupted between two layers: its tokens and those of this call "
    "are taken back, so that the cache is as before both; call the model again"
)


class NoPair(GeometryError, AttributeError):
    """A part of an `EncoderDecoderCache` was asked for: `hasattr` says no, as of any other."""


class Before(NamedTuple):
    """What a cache held before a call: so many tokens; of the call's first layer all, exactly."""

    held: int
    moment: Moment | None = None


class Refusal(NamedTuple):
    """Why an update is refused, and what the cache held before the call."""

    reason: str
    before: Before


class _Update(NamedTuple):
    layer: int
    before: Before
    module: ref[nn.Module] | None


class UpdateOrder:
    """Follows the updates of a cache, and knows those that a decoder's own attention never makes.

    Neither the lengths that a model asks for nor the masks that it makes tell where a call of it
    begins: T5 asks before each attention, and a mask may be the caller's. So it is the module that
    is looked at. Within a call the updates of a decoder's own attention climb from layer to layer;
    where a layer is updated twice in a row, another module is the layer's cross-attention, and the
    same one has begun another call.

    Parameters
    ----------
    throughout : bool
        Whether to look at every call, as for a config that `may_cross_attend`, or only at the
        first, because it takes time in each layer.

    Attributes
    ----------
    over : bool
        Whether there is nothing more to look at.
    """

    def __init__(self, throughout: bool) -> None:
        self._throughout, self.over = throughout, False
        self._latest: _Update | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> UpdateOrder:
        other = memo[id(self)] = UpdateOrder(self._throughout)
        return other

    def refuse(self, index: int, layer: CacheLayerMixin) -> Refusal | None:
        """Return why a layer may not be updated now; None where it may.

        Parameters
        ----------
        index : int
            Which of the model's layers.
        layer : CacheLayerMixin
            The layer as it is before the update.
        """
        latest, self._latest = self._latest, None
        held, module = layer.get_seq_length(), _caller()
        begins = latest is None or index <= latest.layer
        if latest is not None:
            if index == latest.layer and _differ(latest.module, module):
                return Refusal(REMEDY, latest.before)
            # Layers that the interrupted call had reached hold more than the others.
            if not begins and held != latest.before.held and self._throughout:
                return Refusal(_INTERRUPTED, Before(min(held, latest.before.held)))
            self.over = begins and not self._throughout
        # Of later layers nothing is kept: what they let go of would stay in memory until then.
        kept = layer.moment() if begins and isinstance(layer, CompressedLayer) else None
        self._latest = _Update(index, Before(held, kept), module)
        return None

    def asked_for_pair(self) -> Before | None:
        """Return what was held before a call whose cross-attention asks for its cache.

        Some (BERT's) do so after the layer's own attention has updated a cache that is no pair.
        None where anybody else asks.
        """
        latest, asking = self._latest, _caller()
        if latest is None or asking is None or not _differ(latest.module, asking):
            return None
        if getattr(asking(), "layer_idx", None) != latest.layer:
            return None
        self._latest = None
        return latest.before


def may_cross_attend(*configs: Any) -> bool:
    """Whether models of one of these configs may have cross-attention.

    Parts of encoder-decoder models say in their config that they are none (`BartForCausalLM`).
    """
    return any(
        config.is_encoder_decoder
        or getattr(type(config), "is_encoder_decoder", False)
        or getattr(config, "add_cross_attention", False)
        for config in configs
    )


def _caller() -> ref[nn.Module] | None:
    """Return the module whose code updates the cache: transformers tells a cache only the layer."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        module = frame.f_locals.get("self")
        if isinstance(module, nn.Module):
            return ref(module)
        frame = frame.f_back
    return None


def _differ(one: ref[nn.Module] | None, other: ref[nn.Module] | None) -> bool:
    """Whether two updates come from two modules; not so where one isn't known, or is gone."""
    modules = [None if x is None else x() for x in (one, other)]
    return None not in modules and modules[0] is not modules[1]
