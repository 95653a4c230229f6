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


class _Call(NamedTuple):
    """Where a call of a model begins: its first layer, what was held, and whose update it is."""

    layer: int
    before: HeldBefore
    module: ref[nn.Module] | None


_NOTHING = sys.maxsize
"""Stands for the latest layer where no update is known: whichever comes begins a call."""


class UpdateOrder:
    """Follows the updates of a cache, and finds those that another attention makes.

    Within a call of a model the updates of its own attention climb from layer to layer. An update
    of a lower layer begins another call, and so may one of the same layer: of a model with one
    layer, or after an interruption. Or else it is the first layer's cross-attention, made by
    another module of the same model. Neither the lengths that models ask for nor the masks that
    they make tell (T5 asks before each attention, and a mask may be the caller's), so of the
    updates that begin a call, and of no other, the module is looked up.

    Parameters
    ----------
    expected : bool
        Whether the config tells of cross-attention (`may_cross_attend`). Then calls that were
        interrupted are found, too.

    Attributes
    ----------
    latest : int
        The layer that was updated last. Of an order that is not `expected`, an update of a higher
        one needs no look at: it is written here, and that is all.
    """

    def __init__(self, expected: bool) -> None:
        self.expected = expected
        self.forget()

    def __deepcopy__(self, memo: dict[int, Any]) -> UpdateOrder:
        other = memo[id(self)] = UpdateOrder(self.expected)
        return other

    def forget(self) -> None:
        """Begin anew: the cache was reset, rolled back or rearranged."""
        self.latest, self._held = _NOTHING, 0
        self._call: _Call | None = None

    def refuse(self, index: int, layer: CacheLayerMixin) -> Refusal | None:
        """Return why a layer may not be updated now; None where it may.

        Parameters
        ----------
        index : int
            Which of the model's layers.
        layer : CacheLayerMixin
            The layer as it is before the update.
        """
        call, latest, below, held = self._call, self.latest, self._held, layer.get_seq_length()
        if index > latest:
            # Layers that the interrupted call had reached hold more than the others.
            if self.expected and held != below:
                self.forget()
                return Refusal(_INTERRUPTED, HeldBefore(min(held, below)))
        else:
            self.forget()
            module = _caller()
            again = call is not None and index == latest == call.layer
            if again and _differ(call.module, module) and _related(call.module):
                return Refusal(REMEDY, call.before)
            # Of later layers nothing is kept: what they let go of would stay in memory until then.
            kept = layer.moment() if isinstance(layer, CompressedLayer) else None
            self._call = _Call(index, HeldBefore(held, kept), module)
        self.latest, self._held = index, held
        return None

    def asked_for_pair(self) -> HeldBefore | None:
        """Return what was held before a call whose cross-attention asks for its cache.

        Some (BERT's) do so after the layer's own attention has updated a cache that is no pair.
        None where anybody else asks.
        """
        call, asking = self._call, _caller()
        if call is None or asking is None or not _differ(call.module, asking):
            return None
        if getattr(asking(), "layer_idx", None) != self.latest:
            return None
        self.forget()
        return call.before


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

    transformers tells a cache the layer of an update and not the module. Reading the variables of a
    function keeps them until it returns, so those of no other functions than methods are read.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_varnames[:1] == ("self",):
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
