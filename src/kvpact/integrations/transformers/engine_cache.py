"""`EngineCache`: what transformers' caches over kvpact's have in common."""

from __future__ import annotations

from copy import deepcopy
from typing import Any, Self

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from kvpact.cache.paged_view import PagedView
from kvpact.cache.rows import refuse_pickling
from kvpact.integrations.transformers.choice import choose_attention
from kvpact.integrations.transformers.latent import hand_on
from kvpact.integrations.transformers.layer import CompressedLayer
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
    """

    __reduce_ex__ = refuse_pickling

    def __init__(
        self, layers: list[Any], shared: SharedState, attention: str, sparse: bool = False
    ) -> None:
        super().__init__(layers=layers)
        self._shared = shared
        self._loan = choose_attention(shared.config, attention, sparse)
        if shared.latent_dim:
            hand_on(shared.config)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        other = memo[id(self)] = object.__new__(type(self))
        vars(other).update({name: deepcopy(value, memo) for name, value in vars(self).items()})
        return other

    def _own_layers(self) -> list[Any]:
        """Return the layers that hold something of their own: transformers', and hybrid ones."""
        return [layer for layer in self.layers if type(layer) is not CompressedLayer]

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last `-tokens_to_remove` tokens of every row; 0 of them very often."""
        if tokens_to_remove > 0:
            raise ValueError(
                f"crop takes a negative number of tokens to remove, not {tokens_to_remove}"
            )
        for layer in self._own_layers():
            layer.crop(tokens_to_remove)
        for cache in self._shared.stored() if tokens_to_remove else ():
            if isinstance(cache, PagedView):
                for seq in cache.seqs or ():
                    length = cache.cache.seq_len(seq)
                    cache.cache.truncate(seq, max(length + tokens_to_remove, 0))
            else:
                # Layers of which a call that failed had reached only some become equal again.
                length = cache.seq_len(self._shared.held.index(cache))
                cache.truncate(max(length + tokens_to_remove, 0))

    def reset(self) -> None:
        """Forget all tokens and, in a contiguous cache, their shape."""
        for layer in self._own_layers():
            layer.reset()
        self._shared.hold(None, len(self._shared.held))

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Rearrange the batch rows."""
        for layer in self._own_layers():
            layer.reorder_cache(beam_idx)
        for cache in self._shared.stored():
            cache.reorder(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every batch row."""
        for layer in self._own_layers():
            layer.batch_repeat_interleave(repeats)
        for cache in self._shared.stored():
            cache.repeat(repeats)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep some batch rows (indices, or a boolean mask)."""
        for layer in self._own_layers():
            layer.batch_select_indices(indices)
        kept = indices.nonzero().squeeze(1) if indices.dtype == torch.bool else indices
        for cache in self._shared.stored():
            cache.select(kept)
