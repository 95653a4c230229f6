"""`PagedBatch`: transformers' `Cache` over sequences of a paged cache, one batch of an engine."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig
from transformers.cache_utils import Cache, CacheLayerMixin, get_layer_types_and_kwargs

from kvpact.cache.paged import PagedKVCache
from kvpact.cache.paged_view import PagedView
from kvpact.contract import AttendConfig, DequantResult
from kvpact.errors import GeometryError, KVPactError
from kvpact.integrations.transformers.attention import choose_attention
from kvpact.integrations.transformers.handles import (
    as_stored,
    in_held_dtype,
    latent_parts,
    returned_pair,
)
from kvpact.integrations.transformers.latent import hand_on


class PagedTokens:
    """The tokens of one `update`, stored when they are first used (see `Pending`).

    Parameters
    ----------
    view : PagedView
        The rows.
    layer : int
        Layer index.
    k, v : Tensor
        `[B, H_kv, new, D]` and `[B, H_kv, new, D_v]`.
    exact_new : bool
        As in `AttendConfig`.
    forget : callable
        Called when the tokens are used: from then on only the handles keep them.
    """

    def __init__(
        self,
        view: PagedView,
        layer: int,
        k: Tensor,
        v: Tensor,
        exact_new: bool,
        forget: Callable[[], None],
    ) -> None:
        # Used once: tokens of a call that failed are gone, and a later one doesn't store them.
        self.used, self._forget, self._dtypes = False, forget, (k.dtype, v.dtype)
        self.k, self.v = as_stored(k, v, view.cache.geometry.dtype)
        self._view, self._layer, self._exact_new = view, layer, exact_new
        self._latent = view.cache.geometry.latent
        self._parts: tuple[Tensor, Tensor] | None = None

    def attend(self, q: Tensor, config: AttendConfig) -> Tensor:
        """Store the tokens and attend over the past and them.

        Raises
        ------
        KVPactError
            They were used already, or the pool is full (`CacheFull`).
        """
        self._use()
        config = replace(config, padding=self._own_padding(config), exact_new=self._exact_new)
        rows = functools.partial(self._view.attend, self._layer, self.k, self.v)
        return in_held_dtype(rows, q, config)

    def _own_padding(self, config: AttendConfig) -> Tensor | None:
        """Return the padding within each row: what stands left of a shorter row isn't in it."""
        if config.padding is None or self._view.seqs is None:
            return config.padding
        lengths = self._lengths()
        missing = max(lengths) - torch.tensor(lengths, device=config.padding.device)
        padding = (config.padding - missing).clamp(min=0)
        return padding if padding.any() else None

    def _lengths(self) -> list[int]:
        """Return the tokens that each row holds."""
        return [self._view.cache.seq_len(seq, self._layer) for seq in self._view.seqs or ()]

    def _use(self) -> None:
        if self.used:
            raise KVPactError(
                "these tokens were used already: a model that reads K and V of a layer twice can't "
                "run on a paged batch; use CompressedCache"
            )
        self.used = True
        self._forget()

    def store(self) -> DequantResult:
        """Store the tokens; return K and V of all, decompressed when read."""
        self._use()
        config = AttendConfig(exact_new=self._exact_new)
        return self._view.prefill(self._layer, self.k, self.v, None, config)

    def part(self, side: str) -> Tensor:
        """Return K (``k``) or V (``v``) of all tokens, decompressed.

        Raises
        ------
        KVPactError
            Rows have unlike lengths: the zeros in front of the shorter ones would be attended to.
        """
        if self.fresh:
            return self.k.to(self._dtypes[0]) if side == "k" else self.v.to(self._dtypes[1])
        if self._parts is None:
            if len(set(self._lengths())) > 1:
                self._use()
                remedy = "call model.set_attn_implementation('kvpact')"
                if self._latent:
                    remedy += "; 'kv_b_proj' has to be a plain linear layer (no adapter, no hooks)"
                raise KVPactError(
                    "rows of unlike length can't be decompressed into one tensor for the model's "
                    f"own attention; {remedy}"
                )
            result = self.store()
            k, v = latent_parts(result, self.k) if self._latent else (result.k, result.v)
            self._parts = k.to(self._dtypes[0]), v.to(self._dtypes[1])
        return self._parts[0 if side == "k" else 1]

    @property
    def fresh(self) -> bool:
        """Whether these are the sequences' first latents, not yet stored."""
        return self._latent and self._exact_new and not self.used and not any(self._lengths())

    def settle(self, padding: Tensor | None) -> None:
        """Store fresh latents; the model has read them already."""
        self._use()
        config = AttendConfig(padding=padding)
        self._view.prefill(self._layer, self.k, self.v, None, config)


class PagedLayer(CacheLayerMixin):  # type: ignore[no-untyped-call]
    """One layer of a model on the rows of a paged cache.

    Parameters
    ----------
    view : PagedView
        The rows, shared by all layers.
    layer : int
        Layer index.
    exact_new : bool
        As in `AttendConfig`.
    config : PreTrainedConfig
        The decoder's, which names the attention that reads what `update` returns.
    """

    is_sliding = False
    is_compileable = False
    is_croppable = True
    supports_early_init = False
    _pending: PagedTokens | None

    def __init__(
        self, view: PagedView, layer: int, exact_new: bool, config: PreTrainedConfig
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.is_initialized = True
        self._view, self._layer, self._exact_new = view, layer, exact_new
        self._config, self._pending = config, None

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Do nothing: the paged cache has its geometry."""

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Take new tokens; return handles for K and V of all.

        Parameters
        ----------
        key_states, value_states : Tensor
            `[B, H_kv, S, D]` and `[B, H_kv, S, D_v]`.
        """
        self.flush()
        total = self._view.seq_len(self._layer) + key_states.shape[2]
        k, v = key_states.detach(), value_states.detach()
        self._pending = PagedTokens(self._view, self._layer, k, v, self._exact_new, self.forget)
        attention = self._config._attn_implementation
        return returned_pair(self._pending, key_states, value_states, total, attention)

    def flush(self) -> None:
        """Store tokens that nothing used."""
        pending, self._pending = self._pending, None
        if pending is not None and not pending.used:
            pending.store()

    def forget(self) -> None:
        """Let go of tokens that were used, or that nothing is going to use."""
        self._pending = None

    @property
    def batch_size(self) -> int:
        """Rows; not there before the first tokens."""
        if self._view.batch_size is None:
            raise AttributeError("no tokens yet")
        return self._view.batch_size

    def get_seq_length(self) -> int:
        """Tokens of the longest row."""
        waiting = self._pending
        new = 0 if waiting is None or waiting.used else waiting.k.shape[2]
        return self._view.seq_len(self._layer) + new

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Length and offset of the keys that the next update returns."""
        return self.get_seq_length() + query_length, 0

    def get_max_length(self) -> int:
        """No limit but the pool."""
        return -1

    def offload(self) -> None:
        """Do nothing: pages stay where they are."""

    def prefetch(self) -> None:
        """Do nothing: pages stay where they are."""


class PagedBatch(Cache):
    """Sequences of a paged cache as the batch of one call, `model(…, past_key_values=batch)`.

    It holds nothing itself: an engine makes one for whichever sequences run next.

    Parameters
    ----------
    config : PreTrainedConfig
        `model.config`.
    cache : PagedKVCache
        Holds the sequences.
    seqs : sequence of int, optional
        Their ids, one per row. If omitted, sequences are allocated with the first tokens.
    attention, exact_new
        As in `CompressedCache`.

    Raises
    ------
    KVPactError
        A layer of the model has no full attention.
    GeometryError
        The paged cache has another number of layers.
    SequenceError
        An id is unknown, freed or named twice.

    Notes
    -----
    Rows may have unlike lengths. The model needs `position_ids` `[B, S]`, each row's own, and no
    attention mask: rows end together, and each attends to all of its own tokens.
    """

    def __init__(
        self,
        config: PreTrainedConfig,
        cache: PagedKVCache,
        seqs: Sequence[int] | None = None,
        *,
        attention: str = "auto",
        exact_new: bool = True,
    ) -> None:
        decoder = config.get_text_config(decoder=True)
        types, _ = get_layer_types_and_kwargs(decoder)
        others = sorted(set(types) - {"full_attention"})
        if others:
            raise KVPactError(
                f"a paged batch needs full attention in every layer, and this model has "
                f"{', '.join(others)}; use CompressedCache"
            )
        if len(types) != cache.geometry.num_layers:
            raise GeometryError(
                f"the model has {len(types)} layers, the paged cache {cache.geometry.num_layers}"
            )
        self.view = PagedView(cache, seqs)
        self._rows = [
            PagedLayer(self.view, layer, exact_new, decoder) for layer in range(len(types))
        ]
        super().__init__(layers=list(self._rows))
        self._loan = choose_attention(decoder, attention)
        if cache.geometry.latent:
            hand_on(decoder)

    @property
    def seqs(self) -> list[int]:
        """The sequence of each row."""
        return list(self.view.seqs or ())

    def _flush(self) -> None:
        for layer in self._rows:
            layer.flush()

    def reset(self) -> None:
        """Forget all tokens (see `PagedView.reset`)."""
        for layer in self._rows:
            layer.forget()
        self.view.reset()

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last `-tokens_to_remove` tokens of every row."""
        if tokens_to_remove > 0:
            raise ValueError(
                f"crop takes a negative number of tokens to remove, not {tokens_to_remove}"
            )
        self._flush()
        for seq in self.seqs if tokens_to_remove else ():
            length = self.view.cache.seq_len(seq)
            self.view.cache.truncate(seq, max(length + tokens_to_remove, 0))

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Rearrange the rows; a row that is there twice is forked, one that is gone is freed."""
        self._flush()
        self.view.reorder(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every row: its forks share its pages."""
        self._flush()
        self.view.repeat(repeats)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep some rows (indices, or a boolean mask) and free the others."""
        self._flush()
        rows = indices.nonzero().squeeze(1) if indices.dtype == torch.bool else indices
        self.view.select(rows)
