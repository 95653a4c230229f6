"""`EngineCache`: what transformers' caches over kvpact's have in common."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any, Self

import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import Cache, CacheLayerMixin, LinearAttentionCacheLayerMixin

from kvpact.cache.paged_view import PagedView
from kvpact.cache.rows import refuse_pickling
from kvpact.errors import GeometryError, KVPactError, LayerIndexError
from kvpact.integrations.transformers.choice import choose_attention
from kvpact.integrations.transformers.handles import untraced
from kvpact.integrations.transformers.latent import hand_on
from kvpact.integrations.transformers.layer import CompressedLayer
from kvpact.integrations.transformers.pairs import REMEDY, NoPair, Refusal, UpdateOrder
from kvpact.integrations.transformers.shared import SharedState


class EngineCache(Cache):
    """transformers' `Cache` whose compressed layers are the layers of one kvpact cache.

    Parameters
    ----------
    layers : list
        transformers' cache layers, compressed ones and others.
    shared : SharedState
        What the compressed ones share.
    attention : {"auto", "keep"}
        As in `CompressedCache`.
    sparse : bool
        Whether some layers choose the tokens that they attend to (see `choose_attention`).
    order : UpdateOrder
        Looks at who updates the layers.
    """

    __reduce_ex__ = refuse_pickling

    def __init__(
        self,
        layers: list[Any],
        shared: SharedState,
        attention: str,
        order: UpdateOrder,
        sparse: bool = False,
    ) -> None:
        super().__init__(layers=layers)
        self._shared, self._order = shared, order
        self._loan = choose_attention(shared.config, attention, sparse)
        if shared.latent_widths:
            hand_on(shared.config)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        other = memo[id(self)] = object.__new__(type(self))
        vars(other).update({name: deepcopy(value, memo) for name, value in vars(self).items()})
        return other

    @property
    def is_linear(self) -> list[bool]:
        """Whether layers have a state and no K and V; masks take their sizes from others."""
        return [
            isinstance(layer, LinearAttentionCacheLayerMixin)
            and not isinstance(layer, CacheLayerMixin)
            for layer in self.layers
        ]

    def _own_layers(self) -> list[Any]:
        """Return the layers that hold something of their own: transformers', and hybrid ones."""
        return [layer for layer in self.layers if type(layer) is not CompressedLayer]

    @untraced
    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Give a layer new tokens; return what stands for K and V of all (see `CompressedLayer`).

        Raises
        ------
        LayerIndexError
            The cache was made for a model of fewer layers.
        GeometryError
            The cache was given to a model with cross-attention without one for that, or such a
            model's call before this one was interrupted. The cache is as before then.
        """
        if layer_idx >= len(self.layers):
            raise LayerIndexError(
                f"the model has a layer {layer_idx}, its cache is for {len(self.layers)} layers: "
                "make a cache for this model, with CompressedCache(model)"
            )
        order, layer = self._order, self.layers[layer_idx]
        if layer_idx > order.latest and not order.expected:
            order.latest = layer_idx
        else:
            self._require_own_attention(layer_idx)
        return layer.update(key_states, value_states, *args, **kwargs)  # type: ignore

    def _require_own_attention(self, index: int) -> None:
        """Raise if it is not the decoder's own attention that updates a layer."""
        layer = self.layers[index]
        if isinstance(layer, CacheLayerMixin):
            refusal = self._order.refuse(index, layer)
            if refusal is not None:
                self._take_back(refusal)
                raise GeometryError(refusal.reason)

    def _refuse_part_of_a_pair(self) -> Any:
        """Not there: what models (T5Gemma, BERT) read of the `EncoderDecoderCache` they want."""
        before = self._order.asked_for_pair()
        if before is not None:
            self._take_back(Refusal(REMEDY, before))
        raise NoPair(REMEDY)

    self_attention_cache = cross_attention_cache = is_updated = property(_refuse_part_of_a_pair)

    __iter__ = DynamicCache.__iter__

    def offload(self, layer_idx: int, only_non_sliding: bool = True) -> None:
        """Refuse to move a layer: its slots are where attention reads them."""
        raise KVPactError("compressed layers can't be moved: take snapshot(), and restore that")

    prefetch = offload

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last `-tokens_to_remove` tokens of every row; 0 of them very often."""
        if tokens_to_remove > 0:
            raise ValueError(
                f"crop takes a negative number of tokens to remove, not {tokens_to_remove}"
            )
        self._order.forget()
        for layer in self._own_layers():
            layer.crop(tokens_to_remove)
        for cache in self._shared.stored() if tokens_to_remove else ():
            if isinstance(cache, PagedView):
                _remove(cache, -tokens_to_remove)
            else:
                # Layers of which a call that failed had reached only some become equal again.
                length = cache.seq_len(self._shared.held.index(cache))
                cache.truncate(max(length + tokens_to_remove, 0))

    def _take_back(self, refusal: Refusal) -> None:
        """Let no layer hold more than before the call that is refused: as if it was not made.

        Raises
        ------
        KVPactError
            A layer of transformers has let go of tokens that it held before the call.
        """
        length, moment = refusal.before
        if length == 0:
            self.reset()
            return
        for layer in self._own_layers():
            more = layer.get_seq_length() - length
            try:
                if more > 0:
                    layer.crop(-more)
            except RuntimeError as error:
                raise KVPactError(
                    f"{refusal.reason}. Here {type(layer).__name__} can't be taken back to what it "
                    "held before: reset the cache and begin again"
                ) from error
        shared = self._shared
        for tokens in list(shared.waiting):
            if tokens is not None and tokens.total > length:
                tokens.cut(length)
        if moment is not None:
            moment.restore()
        for cache in shared.stored():
            if isinstance(cache, PagedView):  # rows of unlike lengths grow by equally much
                _remove(cache, cache.seq_len(0) - length)
            else:
                cache.truncate(length)
        shared.end_call()

    def reset(self) -> None:
        """Forget all tokens and, in a contiguous cache, their shape."""
        self._order.forget()
        for layer in self._own_layers():
            layer.reset()
        self._shared.hold(None, len(self._shared.held))

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Rearrange the batch rows."""
        self._order.forget()
        for cache in self._shared.stored():
            cache.reorder(beam_idx)
        for layer in self._own_layers():
            layer.reorder_cache(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every batch row."""
        self._order.forget()
        for cache in self._shared.stored():
            cache.repeat(repeats)
        for layer in self._own_layers():
            _change_states(layer, lambda state: state.repeat_interleave(repeats, dim=0))
            if hasattr(layer, "batch_repeat_interleave"):
                layer.batch_repeat_interleave(repeats)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep some batch rows (indices, or a boolean mask)."""
        self._order.forget()
        kept = indices.nonzero().squeeze(1) if indices.dtype == torch.bool else indices
        for cache in self._shared.stored():
            cache.select(kept)
        for layer in self._own_layers():
            _change_states(layer, lambda state: state[kept.to(state.device)])
            if hasattr(layer, "batch_select_indices"):
                layer.batch_select_indices(kept)


def _change_states(layer: Any, change: Callable[[Tensor], Tensor]) -> None:
    """Change what a layer with linear attention holds: transformers' layers can't themselves."""
    if isinstance(layer, LinearAttentionCacheLayerMixin):
        for states in (layer.conv_states, layer.recurrent_states):
            states.update({i: change(x) for i, x in states.items() if x is not None})


def _remove(view: PagedView, tokens: int) -> None:
    """Forget the last tokens of every row."""
    for seq in view.seqs or ():
        view.cache.truncate(seq, max(view.cache.seq_len(seq) - tokens, 0))
