"""One full-attention layer of a model on a compressed cache, contiguous or paged."""

from typing import Any

import torch
from torch import Tensor

from kvpact.cache import ContiguousCache
from kvpact.cache.layer.moment import Moment
from kvpact.cache.stream.advance import MOST_STEP
from kvpact.callable_package import tells_names
from kvpact.integrations.transformers.held.handles import UNUSED, new_pair, refuse_gradients
from kvpact.integrations.transformers.held.new_tokens import NewTokens
from kvpact.integrations.transformers.held.shared import BatchCache, SharedState
from kvpact.integrations.transformers.versions import (
    LinearAttentionLayer,
    TransformersLayer,
    new_tokens,
)
from kvpact.spec import Spec

_TAKES_HANDLES = ("kvpact", "sdpa", "eager", None)


@tells_names(dict.fromkeys(("bits", "compress", "nbytes", "stats"), "cache.stats(), of all layers"))
class CompressedLayer(TransformersLayer):  # type: ignore[no-untyped-call]
    """transformers' cache layer over one layer of a kvpact cache, the compressed layer `index`."""

    is_sliding = False
    is_croppable = True
    supports_early_init = False
    new_tokens = NewTokens
    read_again = False  # true if other layers of the model read what `update` returns, too

    def __init__(self, shared: SharedState, index: int) -> None:
        # The base class would set `keys` and `values`, which are computed here.
        self._shared, self._index = shared, index

    @property
    def cache(self) -> BatchCache | None:
        """The cache that holds the layer's tokens; all of them are stored."""
        tokens = self._shared.waiting[self._index]
        if tokens is not None:
            tokens.store()
        return self._shared.held[self._index]

    @property
    def spec(self) -> Spec:
        """The layer's methods."""
        return self._shared.specs[self._index]

    def moment(self) -> Moment | None:
        """Return the layer's stored state; None where there is none, or tokens wait."""
        cache, waiting = self._shared.held[self._index], self._shared.waiting[self._index]
        if waiting is not None or not isinstance(cache, ContiguousCache):
            return None
        return Moment.of(cache.entry(self._index))

    def cut(self, length: int) -> bool:
        """Forget tokens from `length` on, where the last ones wait; False where none do."""
        tokens = self._shared.waiting[self._index]
        if tokens is not None:
            tokens.cut(length)
        return tokens is not None

    @property
    def is_initialized(self) -> bool:  # type: ignore[override]
        """True once the layer has seen tokens."""
        return self.get_seq_length() > 0

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Do nothing: `update` takes the shape from the first tokens."""

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Append tokens `[B, H_kv, S, D or D_v]`; return what stands for K and V of all."""
        shared, index = self._shared, self._index
        before = shared.waiting[index]
        if index == 0 or shared.held[index] is None:
            shared.attention = shared.config._attn_implementation
            if shared.gone:
                shared.gaps.check(shared.attention)
        if before is not None:
            if before.grow(key_states, value_states):
                return before.k, before.v
            before.store()
        tokens = self.new_tokens(shared, index, key_states, value_states, self.read_again)
        first = tokens.total == key_states.shape[2]
        if first and tokens.wait_whole(key_states, value_states):
            return tokens.k, tokens.v
        if index + 1 == len(shared.waiting):
            shared.look(tokens.total - key_states.shape[2])
        return returned_pair(tokens, key_states, value_states)

    def _whole(self, side: str) -> Tensor | None:
        cache = self.cache
        if not isinstance(cache, ContiguousCache) or cache.seq_len(self._index) == 0:
            return None
        return cache.dequantize(self._index, side)

    @property
    def keys(self) -> Tensor | None:  # type: ignore[override]
        """K of all tokens, decompressed for code that looks at it; None for pages."""
        return self._whole("k")

    @property
    def values(self) -> Tensor | None:  # type: ignore[override]
        """V of all tokens, decompressed for code that looks at it; None for pages."""
        return self._whole("v")

    @property
    def batch_size(self) -> int:
        """Rows of the batch; not there before the first tokens."""
        cache = self.cache
        if cache is None or cache.batch_size is None:
            raise AttributeError("no tokens yet")
        return cache.batch_size

    def get_seq_length(self) -> int:
        """Tokens of the longest row, those that the cache has dropped, too."""
        tokens, cache = self._shared.waiting[self._index], self._shared.held[self._index]
        if tokens is not None:
            total: int = tokens.total
        else:
            total = 0 if cache is None else cache.seq_len(self._index)
        return total + self._shared.gone

    def get_mask_sizes(self, query_length: int | Tensor) -> tuple[int, int]:
        """Length and offset of the keys that the next update returns."""
        gone, query_length = self._shared.gone, new_tokens(query_length)
        if not torch.compiler.is_compiling():
            self._shared.heap.begin(query_length)
        return self.get_seq_length() - gone + query_length, gone

    def get_max_length(self) -> int:
        """No limit (but a pool's)."""
        return -1


class CompressedHybridLayer(LinearAttentionLayer, CompressedLayer):  # type: ignore
    """A layer with full attention, compressed, and a linear one, whose states stay as they are."""

    is_compileable = False

    def __init__(self, shared: SharedState, index: int, number_of_states: int = 1) -> None:
        CompressedLayer.__init__(self, shared, index)
        LinearAttentionLayer.__init__(self, number_of_states)


def returned_pair(
    tokens: NewTokens, k: Tensor, v: Tensor, read: bool = False
) -> tuple[Tensor, Tensor]:
    """Return handles for K and V of all tokens; decompressed ones where attention reads memory."""
    shared = tokens.shared
    differentiable = torch.is_grad_enabled() and (k.requires_grad or v.requires_grad)
    if read or shared.attention not in _TAKES_HANDLES:
        made = tokens.part("k"), tokens.part("v")
    else:
        total = tokens.total - tokens.unseen
        like = total, k.shape, v.shape, k.dtype, v.dtype, k.device
        # Taken away first, so that no other thread gets the same.
        pair, shared.handles = shared.handles, None
        if pair is None or pair.like != like or pair.references() != UNUSED:
            pair = new_pair(tokens, k, v, total, like)
        pair.k.pending = pair.v.pending = tokens
        made = pair.k, pair.v
        if not differentiable and k.shape[2] <= MOST_STEP:
            shared.handles = pair
    if differentiable:
        made = refuse_gradients(made[0]), refuse_gradients(made[1])
    return made
