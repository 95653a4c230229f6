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
    layer: int
    before: HeldBefore
    module: ref[nn.Module] | None


class UpdateOrder:
    """Follows the updates of a cache, and finds those that another attention makes.

    Within a call of a model the updates of its own attention climb from layer to layer. One of the
    same layer again begins another call, or comes from the layer's cross-attention, another module
    of the model. Neither the lengths that models ask for nor their masks tell which (T5 asks before
    each attention, and a mask may be the caller's). So of the update that begins a call, and of no
    other, the module is looked up.

    Parameters
    ----------
    expected : bool
        Whether the config tells of cross-attention (`may_cross_attend`). Then calls that were
        interrupted are found, too.
    """

    def __init__(self, expected: bool) -> None:
        self.expected = expected
        self.forget()

    def __deepcopy__(self, memo: dict[int, Any]) -> UpdateOrder:
        other = memo[id(self)] = UpdateOrder(self.expected)
        return other

    def forget(self) -> None:
        """Begin anew: the cache was reset, rolled back or rearranged."""
        self.latest, self._held = sys.maxsize, 0  # the next update begins a call
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
            module = next(_modules(), None)
            if call is not None and index == latest == call.layer and _crosses(call, module):
                return Refusal(REMEDY, call.before)
            # Of later layers nothing is kept: what they let go of would stay in memory until then.
            kept = layer.moment() if isinstance(layer, CompressedLayer) else None
            own = None if module is None else ref(module)
            self._call = _Call(index, HeldBefore(held, kept), own)
        self.latest, self._held = index, held
        return None

    def asked_for_pair(self) -> HeldBefore | None:
        """Return what was held before a call whose cross-attention asks for its cache.

        Some (BERT's) do so after the layer's own attention has updated a cache that is no pair.
        None where anybody else asks.
        """
        call, asking = self._call, next(_modules(), None)
        if call is None or getattr(asking, "layer_idx", None) != self.latest:
            return None
        if not _crosses(call, asking):
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
    """Yield the modules whose code is running, the innermost first."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        # Reading a function's variables keeps them until it returns: no others are read.
        if frame.f_code.co_varnames[:1] == ("self",):
            module = frame.f_locals.get("self")
            if isinstance(module, nn.Module):
                yield module
        frame = frame.f_back


def _crosses(call: _Call, module: nn.Module | None) -> bool:
    """Whether a module is not the one that began a call, but one of the same model, which runs."""
    own = None if call.module is None else call.module()
    if own is None or module is None or module is own:
        return False
    return any(part is own for running in _modules() for part in running.modules())
