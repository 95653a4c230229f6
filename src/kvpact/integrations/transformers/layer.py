"""One full-attention layer of a model on a compressed cache."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig
from transformers.cache_utils import (
    CacheLayerMixin,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionCacheLayerMixin,
    LinearAttentionLayer,
)

from kvpact.cache import ContiguousCache, cache_specs
from kvpact.geometry import CacheGeometry
from kvpact.integrations.transformers.handles import Pending, as_stored, returned_pair
from kvpact.kernels import Compute
from kvpact.spec import Spec


class CompressedLayer(CacheLayerMixin):  # type: ignore[no-untyped-call]
    """transformers' cache layer over a `ContiguousCache` of one layer.

    Parameters
    ----------
    spec : Spec
        Methods for K and V.
    exact_new : bool
        As in `AttendConfig`.
    latent_dim : int, optional
        Width of the latents of a model with latent attention (MLA).
    compute : Compute, optional
        What was asked to compute; the best that is there if omitted.
    config : PreTrainedConfig, optional
        The decoder's, which names the attention that reads what `update` returns.
    """

    is_sliding = False
    is_compileable = False
    is_croppable = True
    supports_early_init = False

    def __init__(
        self,
        spec: Spec,
        exact_new: bool = True,
        latent_dim: int | None = None,
        compute: Compute | None = None,
        config: PreTrainedConfig | None = None,
    ) -> None:
        # The base class would set `keys` and `values`, which are computed here.
        self.spec, self._exact_new, self._latent_dim = spec, exact_new, latent_dim
        self._compute, self._config = compute, config
        self.cache: ContiguousCache | None = None
        self._pending: Pending | None = None

    @property
    def is_initialized(self) -> bool:  # type: ignore[override]
        """Whether the layer has seen tokens."""
        return self.cache is not None

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Take the geometry from the first tokens."""
        k, v = as_stored(key_states[:, :, :0], value_states[:, :, :0], None)
        heads, width = k.shape[1], k.shape[3]
        latent = heads == 1 and width == self._latent_dim
        geometry = CacheGeometry(1, heads, width, v.shape[3], k.dtype, latent)
        specs = cache_specs(self.spec, geometry)
        self.cache = ContiguousCache(specs, geometry, compute=self._compute)
        self.dtype, self.device = key_states.dtype, key_states.device

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Take new tokens; return handles for K and V of all.

        Parameters
        ----------
        key_states, value_states : Tensor
            `[B, H_kv, S, D]` and `[B, H_kv, S, D_v]`.
        """
        cache = self.flushed()
        if cache is None:
            self.lazy_initialization(key_states, value_states)
            assert self.cache is not None
            cache = self.cache
        total = cache.seq_len() + key_states.shape[2]
        pending = Pending(
            cache, key_states.detach(), value_states.detach(), self._exact_new, self._forget
        )
        self._pending = pending
        attention = None if self._config is None else self._config._attn_implementation
        return returned_pair(pending, key_states, value_states, total, attention)

    def take_over(self, cache: ContiguousCache) -> None:
        """Hold what a cache of one layer holds."""
        self._pending, self.cache = None, cache if cache.batch_size is not None else None
        tail = next(iter(cache.tails()), None)
        if tail is not None:
            self.dtype, self.device = tail.dtype, tail.device

    def _forget(self) -> None:
        self._pending = None

    def flushed(self) -> ContiguousCache | None:
        """Return the cache with all tokens stored."""
        pending, self._pending = self._pending, None
        if pending is not None and pending.waiting:
            pending.store()
        return self.cache

    def _whole(self, side: str) -> Tensor | None:
        cache = self.flushed()
        return None if cache is None or cache.seq_len() == 0 else cache.dequantize(0, side)

    @property
    def keys(self) -> Tensor | None:  # type: ignore[override]
        """K of all tokens, decompressed for code that looks at it."""
        return self._whole("k")

    @property
    def values(self) -> Tensor | None:  # type: ignore[override]
        """V of all tokens, decompressed for code that looks at it."""
        return self._whole("v")

    @property
    def batch_size(self) -> int:
        """Rows of the batch; not there before the first tokens."""
        cache = self.flushed()
        if cache is None or cache.batch_size is None:
            raise AttributeError("no tokens yet")
        return cache.batch_size

    def get_seq_length(self) -> int:
        """Tokens held."""
        pending = self._pending
        held = 0 if self.cache is None else self.cache.seq_len()
        return held + pending.k.shape[2] if pending is not None and pending.waiting else held

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Length and offset of the keys that the next update returns."""
        return self.get_seq_length() + query_length, 0

    def get_max_length(self) -> int:
        """No limit."""
        return -1

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last `-tokens_to_remove` tokens; called with 0 in every assisted step."""
        if tokens_to_remove > 0:
            raise ValueError(
                f"crop takes a negative number of tokens to remove, not {tokens_to_remove}"
            )
        cache = self.flushed() if tokens_to_remove else None
        if cache is not None:
            cache.truncate(max(cache.seq_len() + tokens_to_remove, 0))

    def reset(self) -> None:
        """Forget all tokens and the geometry."""
        self._pending = self.cache = None

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Rearrange the batch rows."""
        cache = self.flushed()
        if cache is not None:
            cache.reorder(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every batch row."""
        cache = self.flushed()
        if cache is not None:
            cache.repeat(repeats)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep some batch rows (indices, or a boolean mask)."""
        cache = self.flushed()
        if cache is not None:
            rows = indices.nonzero().squeeze(1) if indices.dtype == torch.bool else indices
            cache.select(rows)

    def offload(self) -> None:
        """Do nothing: a compressed layer stays where it is."""

    def prefetch(self) -> None:
        """Do nothing: a compressed layer stays where it is."""

    def __deepcopy__(self, memo: dict[int, Any]) -> CompressedLayer:
        other = self._empty()
        cache = self.flushed()
        if cache is not None:
            other.cache = cache.fork()
            other.dtype, other.device = self.dtype, self.device
        return other

    def _empty(self) -> CompressedLayer:
        return type(self)(self.spec, self._exact_new, self._latent_dim, self._compute, self._config)


class CompressedHybridLayer(CompressedLayer, LinearAttentionAndFullAttentionLayer):  # type: ignore
    """A layer with full attention, compressed, beside a linear one, whose state stays as it is.

    Parameters
    ----------
    *args
        As of `CompressedLayer`.
    number_of_states : int
        As transformers wants it.
    """

    is_croppable = LinearAttentionCacheLayerMixin.is_croppable

    def __init__(self, *args: Any, number_of_states: int = 1) -> None:
        CompressedLayer.__init__(self, *args)
        LinearAttentionLayer.__init__(self, number_of_states)

    def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
        """Take the shapes of K and V (given by position) or of a state (by name)."""
        kind = CompressedLayer if args else LinearAttentionLayer
        kind.lazy_initialization(self, *args, **kwargs)

    def offload(self) -> None:
        """Move the states to the CPU."""
        LinearAttentionLayer.offload(self)  # type: ignore[no-untyped-call]

    def prefetch(self) -> None:
        """Bring the states back."""
        LinearAttentionLayer.prefetch(self)  # type: ignore[no-untyped-call]

    def reset(self) -> None:
        """Forget tokens and states."""
        LinearAttentionLayer.reset(self)
        CompressedLayer.reset(self)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Rearrange the batch rows."""
        LinearAttentionLayer.reorder_cache(self, beam_idx)  # type: ignore[arg-type]
        CompressedLayer.reorder_cache(self, beam_idx)

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last tokens, where transformers can undo the states."""
        LinearAttentionLayer.crop(self, tokens_to_remove)
        CompressedLayer.crop(self, tokens_to_remove)

    def __deepcopy__(self, memo: dict[int, Any]) -> CompressedLayer:
        other = super().__deepcopy__(memo)
        states = vars(LinearAttentionLayer(self.number_of_states))
        vars(other).update({name: deepcopy(vars(self)[name], memo) for name in states})
        return other
