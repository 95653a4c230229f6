"""What keeps the self-attention and the cross-attention of a model out of one and the same cache.

Decoders with cross-attention want an `EncoderDecoderCache`, a cache for each. Given a single one,
most of their code writes both into it, layer by layer, and goes on with wrong tokens in silence.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
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
    "EncoderDecoderCache(CompressedCache(model, spec), DynamicCache()), or none after "
    "enable(model, spec)"
)
_INTERRUPTED = (
    "a call before this one was interrupted between two layers: its tokens and those of this call "
    "are taken back, so that the cache is as before both; call the model again"
)


class NoPair(GeometryError, AttributeError):
    """A part of an `EncoderDecoderCache` was asked for: `hasattr` says no, as of any other."""


class HeldBefore(NamedTuple):
    """What a cache held before a call: so many tokens; of the call's first layer all, exactly."""

    held: int
    moment: Moment | None = None


class Refusal(NamedTuple):
    """Why an update is refused, and what the cache held before the call."""

    reason: str
    before: HeldBefore


class _Update(NamedTuple):
    layer: int
    before: HeldBefore
    module: ref[nn.Module] | None


class UpdateOrder:
    """Follows the updates of a cache, and finds those that another attention makes.

    Neither the lengths that a model asks for nor the masks that it makes tell where a call of it
    begins: T5 asks before each attention, and a mask may be the caller's. So it is the module that
    is looked at. Within a call the updates of a decoder's own attention climb from layer to layer;
    where a layer is updated twice in a row, another module of the same model is the layer's
    cross-attention, and the same one has begun another call.

    Parameters
    ----------
    expected : bool
        Whether the config tells of cross-attention (`may_cross_attend`). Then calls that were
        interrupted are found, too.
    """

    def __init__(self, expected: bool) -> None:
        self.expected = expected
        self._latest: _Update | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> UpdateOrder:
        other = memo[id(self)] = UpdateOrder(self.expected)
        return other

    def forget(self) -> None:
        """Begin anew: the cache was reset, rolled back or rearranged."""
        self._latest = None

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
            if index == latest.layer and _differ(latest.module, module) and _related(latest.module):
                return Refusal(REMEDY, latest.before)
            # Layers that the interrupted call had reached hold more than the others.
            if not begins and held != latest.before.held and self.expected:
                return Refusal(_INTERRUPTED, HeldBefore(min(held, latest.before.held)))
        # Of later layers nothing is kept: what they let go of would stay in memory until then.
        kept = layer.moment() if begins and isinstance(layer, CompressedLayer) else None
        self._latest = _Update(index, HeldBefore(held, kept), module)
        return None

    def asked_for_pair(self) -> HeldBefore | None:
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


def _modules() -> Iterator[nn.Module]:
    """Yield the modules whose code is running, the innermost first.

    transformers tells a cache the layer of an update and not the module, so the stack is looked up.
    Reading a frame's variables keeps them until its function returns: K and V of one layer.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        module = frame.f_locals.get("self")
        if isinstance(module, nn.Module):
            yield module
        frame = frame.f_back


def _caller() -> ref[nn.Module] | None:
    """Return the module whose code updates the cache."""
    module = next(_modules(), None)
    return None if module is None else ref(module)


def _differ(one: ref[nn.Module] | None, other: ref[nn.Module] | None) -> bool:
    """Whether two updates come from two modules; not so where one isn't known, or is gone."""
    modules = [None if x is None else x() for x in (one, other)]
    return None not in modules and modules[0] is not modules[1]


def _related(one: ref[nn.Module] | None) -> bool:
    """Whether a module is part of one that is running: not so of another instance of a model."""
    module = None if one is None else one()
    return any(part is module for running in _modules() for part in running.modules())
