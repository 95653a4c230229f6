"""What keeps the self-attention and the cross-attention of a model out of one and the same cache.

Decoders with cross-attention want an `EncoderDecoderCache`, a cache for each. Given a single one,
most of their code writes both into it, layer by layer, and goes on with wrong tokens in silence.
"""

from __future__ import annotations

import sys
from typing import Any, NamedTuple

from kvpact.cache.room import Moment
from kvpact.errors import GeometryError
from kvpact.integrations.transformers.layer import CompressedLayer

REMEDY = (
    "this model's cross-attention wants a cache of its own: pass past_key_values="
    "EncoderDecoderCache(CompressedCache(model, spec), DynamicCache()), or none after "
    "enable(model, spec)"
)
REPEATED = (
    f"{REMEDY}. If it has one, the call before was interrupted in its first layer, and the cache "
    "is as before it: call the model again"
)


class NoPair(GeometryError, AttributeError):
    """A part of an `EncoderDecoderCache` was asked for: `hasattr` says no, as of any other."""


class FirstLayer(NamedTuple):
    """The layer that a call updates first, and what it held before: so many tokens, and exactly."""

    layer: Any
    held: int
    moment: Moment | None


class UpdateOrder:
    """Follows the updates of a cache: a call's first layer, twice in a row, is cross-attention's.

    Within a call of a model the updates of its own attention climb from layer to layer. A model of
    one layer repeats it in every call, so there nobody can tell (`watched` is false).
    """

    def __init__(self, watched: bool) -> None:
        self.watched = watched
        self.forget()

    def __deepcopy__(self, memo: dict[int, Any]) -> UpdateOrder:
        other = memo[id(self)] = UpdateOrder(self.watched)
        return other

    def forget(self) -> None:
        """Begin anew: the cache was reset, rolled back or rearranged."""
        self._latest = sys.maxsize  # the next update begins a call
        self._first: FirstLayer | None = None

    def first(self) -> FirstLayer | None:
        """Return a call's first layer while that alone has taken tokens."""
        first = self._first
        return first if first is not None and first.layer.get_seq_length() > first.held else None

    def repeated(self, index: int, layer: Any) -> FirstLayer | None:
        """Note an update to come; return the layer if it repeats a call's first."""
        first = self.first()
        if first is not None and index == self._latest:
            return first
        begins, self._latest, self._first = index <= self._latest, index, None
        if begins:
            moment = layer.moment() if isinstance(layer, CompressedLayer) else None
            self._first = FirstLayer(layer, layer.get_seq_length(), moment)
        return None


def may_cross_attend(*configs: Any) -> bool:
    """Whether a config, or its class (`BartForCausalLM`), tells of cross-attention."""
    names = "is_encoder_decoder", "add_cross_attention", "cross_attention_hidden_size"
    return any(
        getattr(type(config), "is_encoder_decoder", False)
        or any(getattr(config, name, None) for name in names)
        for config in configs
    )
