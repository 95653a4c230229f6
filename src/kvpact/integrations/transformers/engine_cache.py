"""`TransformersCache`: the common base of transformers' caches over kvpact's."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from copy import deepcopy
from typing import Any, NamedTuple, Self
from weakref import ref

import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicSlidingWindowLayer

from kvpact.cache.batch.rows import check_rows, refuse_pickling
from kvpact.cache.layer.moment import Moment
from kvpact.cache.paged.view import PagedView
from kvpact.cache.stats import Summarized
from kvpact.cache.stream.advance import MOST_STEP
from kvpact.errors import GeometryError, KVPactError, LayerIndexError
from kvpact.geometry import check_count
from kvpact.integrations.transformers import versions
from kvpact.integrations.transformers.attention.forward import choose_attention
from kvpact.integrations.transformers.attention.plain import note_prompt
from kvpact.integrations.transformers.held.handles import untraced
from kvpact.integrations.transformers.held.shared import BatchCache, SharedState, remove_last
from kvpact.integrations.transformers.layers.engine_layers import (
    check_removable,
    forget,
    let_prompt_go,
    records_of,
)
from kvpact.integrations.transformers.layers.full import CompressedLayer
from kvpact.integrations.transformers.layers.indexed import CompressedIndexedLayer
from kvpact.integrations.transformers.layers.latent import hand_on
from kvpact.integrations.transformers.layers.made_keys import CompressedValueLayer
from kvpact.integrations.transformers.layers.sliding import CompressedSlidingLayer
from kvpact.integrations.transformers.versions import LinearAttentionCacheLayerMixin

REMEDY = (
    f"this model's cross-attention wants a cache of its own: pass {versions.CACHE}="
    "EncoderDecoderCache(CompressedCache(model, spec), DynamicCache()), or none after "
    "enable(model, spec)"
)
REPEATED = (
    f"{REMEDY}. If it has one, the call before was interrupted in its first layer, and the cache "
    "is as before it: call the model again"
)
FAILED = (
    "a call of the model failed when some of its layers had taken its tokens, and they can't be "
    "taken back: reset the cache and begin again"
)


class NoPair(GeometryError, AttributeError):
    """A part of an `EncoderDecoderCache` was asked for: `hasattr` says no, as of any other."""


class FirstLayer(NamedTuple):
    """The layer that a call updates first, with its tokens from before the call."""

    layer: Any
    held: int
    moment: Moment | None


class UpdateOrder:
    """Follows the updates of a cache: a call's first layer, twice in a row, is cross-attention's.

    A model of one layer repeats it in every call, so there nobody can tell (`watched` is false).
    """

    def __init__(self, watched: bool) -> None:
        self.watched = watched
        self.forget()

    def __deepcopy__(self, memo: dict[int, Any]) -> UpdateOrder:
        other = memo[id(self)] = UpdateOrder(self.watched)
        return other

    def forget(self) -> None:
        """Start over: the cache was reset, rolled back or rearranged."""
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
    """Return whether a config, or its class (`BartForCausalLM`), has cross-attention."""
    names = "is_encoder_decoder", "add_cross_attention", "cross_attention_hidden_size"
    return any(
        versions.has_encoder(type(config)) or any(getattr(config, name, None) for name in names)
        for config in configs
    )


class TransformersCache(Summarized, Cache):
    """transformers' `Cache` whose compressed layers are the layers of one kvpact cache."""

    __reduce_ex__ = refuse_pickling
    _model: ref[torch.nn.Module] | None = None

    def __init__(
        self,
        layers: list[Any],
        shared: SharedState,
        attention: str,
        crosses: bool,
        sparse: bool,
        rings: SharedState | None = None,
    ) -> None:
        super().__init__(layers=layers)
        for layer in self._own_layers():
            records_of(layer)  # refuses by name what it does not know
        # In T5's configs, and in those like it, the other numbers of layers are the encoder's.
        count = getattr(shared.config, "num_decoder_layers", None) or len(layers)
        self._rings = rings or SharedState(shared.config, shared.exact_new, [])
        self._shared, self._order = shared, UpdateOrder(crosses and count > 1)
        ends = [
            i for i, x in enumerate(layers[:count]) if isinstance(x, CacheLayerMixin) and _counts(x)
        ]
        self._first, self._last = ends[0], ends[-1]
        self._called = self._told_less = False
        # Exact values make the model's own keys, and its logits are the very same.
        self._exact = any(isinstance(layer, CompressedValueLayer) for layer in layers)
        self._exact = self._exact and all(spec.value.name == "none" for spec in shared.specs)
        self._loan = choose_attention(shared.config, attention, sparse)
        if shared.latent_widths:
            hand_on(shared.config)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        other = memo[id(self)] = object.__new__(type(self))
        vars(other).update({name: deepcopy(value, memo) for name, value in vars(self).items()})
        return other

    @property
    def is_linear(self) -> list[bool]:
        """True for layers with a state and no K and V; masks take their sizes from others."""
        return [
            isinstance(layer, LinearAttentionCacheLayerMixin)
            and not isinstance(layer, CacheLayerMixin)
            for layer in self.layers
        ]

    @property
    def stands(self) -> bool:
        """True if layers hold windows or states, which stand at one count of tokens."""
        return bool(self._own_layers() or self._rings.specs)

    def _own_layers(self) -> list[Any]:
        """Return the layers that hold something of their own: transformers', and hybrid ones."""
        packed = CompressedLayer, CompressedSlidingLayer
        return [layer for layer in self.layers if type(layer) not in packed]

    @untraced
    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Give a layer new tokens, or raise `GeometryError`; return K and V of all."""
        if layer_idx >= len(self.layers):
            raise LayerIndexError(
                f"the model has a layer {layer_idx}, its cache is for {len(self.layers)} layers: "
                "make a cache for this model, with CompressedCache(model)"
            )
        layer = self.layers[layer_idx]
        if self._order.watched:
            first = self._order.repeated(layer_idx, layer)
            if first is not None:
                self._take_back(first)
                raise GeometryError(REPEATED)
        if self._told_less and layer_idx == self._first:
            self._told_less = False
            self._begin(_tokens_of(layer))
        pair = layer.update(key_states, value_states, *args, **kwargs)  # type: ignore[union-attr]
        if key_states.shape[2] > MOST_STEP and isinstance(layer, DynamicSlidingWindowLayer):
            let_prompt_go(layer)
            if not self._exact:
                note_prompt(pair[0])
        return pair

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Tokens of the longest row; those left by a call that failed do not count."""
        length: int = super().get_seq_length(layer_idx)
        end: Any = self.layers[self._last]
        if length <= end.get_seq_length():
            return length
        kept = self._kept(length)
        if kept < length:
            self._told_less = True
        return kept

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """Length and offset of the keys that a layer's next update returns: a call begins."""
        length: int = super().get_seq_length(layer_idx)
        end: Any = self.layers[self._last]
        if length > end.get_seq_length():
            self._begin(length)
        self._called = True
        sizes: tuple[int, int] = super().get_mask_sizes(query_length, layer_idx)
        return sizes

    def _kept(self, length: int) -> int:
        """Return how many of a layer's tokens are kept: a failed call never reached the last."""
        end: Any = self.layers[self._last]
        kept: int = end.get_seq_length()
        # While a call runs, no layer is asked that it has reached already. Who fills layers by hand
        # asks for no mask.
        if length <= kept or not self._called or torch.compiler.is_compiling():
            return length
        return kept if kept or self._reaches_last() else length

    def _reaches_last(self) -> bool:
        """Return whether the model is known to have the last layer; scripts cut some off."""
        model = None if self._model is None else self._model()
        modules = () if model is None else model.modules()
        return any(vars(module).get("layer_idx") == self._last for module in modules)

    def _begin(self, length: int) -> None:
        """Begin a call in a layer that holds so many tokens: take back those of one that failed."""
        kept = self._kept(length)
        if kept < length:
            try:
                self._go_back(kept)
            except KVPactError as error:
                raise KVPactError(f"{FAILED}. {error}") from error

    def _go_back(self, length: int) -> None:
        """Let all layers hold `length` tokens, those that hold more."""
        if length:
            self.crop(length - max(map(_tokens_of, self.layers)))
        else:
            self.reset()

    def _refuse_part_of_a_pair(self) -> Any:
        """Refuse what models (T5Gemma, BERT) read of the `EncoderDecoderCache` they want."""
        first = self._order.first()  # BERT's cross-attention asks when its own has taken tokens
        if first is not None:
            self._take_back(first)
        raise NoPair(REMEDY)

    self_attention_cache = cross_attention_cache = is_updated = property(_refuse_part_of_a_pair)

    __iter__ = DynamicCache.__iter__

    def offload(self, layer_idx: int, only_non_sliding: bool = True) -> None:
        """Refuse to move a layer: its slots are where attention reads them."""
        raise KVPactError("compressed layers can't be moved: take snapshot(), and restore that")

    prefetch = offload

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last `-tokens_to_remove` tokens of every row; 0 of them very often."""
        held = max(map(_tokens_of, self.layers), default=0)
        own, count = self._own_layers(), -versions.tokens_to_remove(tokens_to_remove, held)
        self._order.forget()
        rings = [layer for layer in self.layers if isinstance(layer, CompressedSlidingLayer)]
        # Layers of which a call that failed had reached only some become equal again.
        length = max(held - count, 0)
        if count:
            own = [x for x in own if not _counts(x) or _tokens_of(x) > length]
            check_removable([*own, *rings], count)
            self._shared.gaps.cut(length)
        for ring in rings:
            ring.cut_to(length if count else ring.get_seq_length())
        for layer in own:
            # With 0 a layer that records the past drops what it needs no longer.
            if count or getattr(layer, "record_past", False):
                layer.crop(length - _tokens_of(layer) if count and _counts(layer) else -count)
        if count:
            self._shared.remove(count, length)
        for layer in self._own_layers():
            if isinstance(layer, CompressedIndexedLayer):
                layer.fit_index()

    def _take_back(self, first: FirstLayer) -> None:
        """Restore a call's first layer exactly to its state before the call."""
        layer, held, moment = first
        own = self._shared.gaps.held(held)
        if held == 0:
            self.reset()
        elif not isinstance(layer, CompressedLayer):
            try:
                layer.crop(held - layer.get_seq_length())
            except (RuntimeError, ValueError) as error:
                raise KVPactError(
                    f"{REMEDY}. Here {type(layer).__name__} can't be taken back to what it held "
                    "before: reset the cache and begin again"
                ) from error
        elif not layer.cut(own):
            if moment is not None:
                moment.restore()
            elif isinstance(cache := layer.cache, PagedView):  # all rows grow by equally much
                remove_last(cache, cache.seq_len(0) - own)
            elif cache is not None:
                cache.truncate(own)
        self._shared.end_call()

    def reset(self) -> None:
        """Forget all tokens and, in a contiguous cache, their shape."""
        self._order.forget()
        for layer in self._own_layers():
            forget(layer)
        for shared in (self._shared, self._rings):
            shared.recording = False
            shared.hold(None, len(shared.held))

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Rearrange the batch rows."""
        self._change_rows(lambda cache: cache.reorder(beam_idx), lambda batch: beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every batch row."""
        check_count("repeats", repeats, 1)

        def rows(batch: int) -> Tensor:
            return torch.arange(batch, dtype=torch.int64, device="cpu").repeat_interleave(repeats)

        self._change_rows(lambda cache: cache.repeat(repeats), rows)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep some batch rows (indices, or a boolean mask)."""
        kept = indices.nonzero()[:, 0] if getattr(indices, "dtype", 0) == torch.bool else indices
        self._change_rows(lambda cache: cache.select(kept), lambda batch: kept)

    def _change_rows(
        self, compressed: Callable[[BatchCache], None], chosen: Callable[[int], Tensor]
    ) -> None:
        """Let all layers hold the rows chosen of a batch, or none where that raises."""
        self._order.forget()
        held = [record for layer in self._own_layers() for record in records_of(layer)]
        caches = [*self._shared.stored(), *self._rings.stored()]
        sizes = [x.batch_size for x in caches] + [x.rows for x in held]
        batch = next((size for size in sizes if size is not None), None)
        if batch is None:
            return
        check_rows(chosen(batch), batch)
        changed = [record.with_rows(chosen(batch)) for record in held]
        for cache in caches:
            compressed(cache)
        for record, tensor in zip(held, changed, strict=True):
            record.put(tensor)


def _counts(layer: Any) -> bool:
    """Return whether a layer counts its tokens; those with nothing but a state don't."""
    return isinstance(layer, CompressedLayer) or hasattr(layer, "cumulative_length")


def _tokens_of(layer: Any) -> int:
    """Return how many tokens a layer that counts them was given."""
    return layer.get_seq_length() if _counts(layer) else 0


def tensors_of(layer: Any) -> Iterator[Tensor]:
    """Yield the tensors of one of transformers' layers: K and V, or states of linear attention."""
    if isinstance(layer, CompressedValueLayer) and layer.positions is not None:
        yield layer.positions
    for name, value in vars(layer).items():
        if not name.startswith("_"):
            for tensor in value.values() if isinstance(value, dict) else (value,):
                if isinstance(tensor, Tensor):
                    yield tensor
