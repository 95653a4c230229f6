"""Layers with sliding attention whose tokens are packed: a stream that drops its front.

A layer with a window of W tokens holds at least the last W - 1, as transformers' own ring does, and
as many in front of them as are in the same segment of slots. To the model it is a ring, and it sees
one: what lies in front is hidden from its attention.
"""

from typing import Any

import torch
from torch import Tensor

from kvpact.cache import ContiguousCache
from kvpact.cache.layer.layer import CacheLayer
from kvpact.cache.layer.let_go import keep_last
from kvpact.contract import AttendConfig
from kvpact.errors import KVPactError, SpecError
from kvpact.integrations.transformers.attention.plain import hides_as_window
from kvpact.integrations.transformers.held.new_tokens import NewTokens
from kvpact.integrations.transformers.held.shared import SharedState
from kvpact.integrations.transformers.layers.full import CompressedLayer
from kvpact.integrations.transformers.layers.rings import packed_ring
from kvpact.integrations.transformers.model.facts import ENTRIES, SLIDING, LayerFacts
from kvpact.integrations.transformers.versions import new_tokens
from kvpact.key_offset import KeyOffset
from kvpact.spec import Spec, parse_spec

_OTHERS = {"chunked_attention", "hybrid_sliding", *ENTRIES}


def rings_of(
    sliding: str | Spec | None,
    shared: SharedState,
    facts: LayerFacts,
    crosses: bool,
    offsets: dict[int, KeyOffset] | None,
) -> SharedState:
    """Return the shared state of layers whose windows are packed: no layers without a spec."""
    config, exact_new, compute = shared.config, shared.exact_new, shared.compute
    if sliding is None:
        return SharedState(config, exact_new, [], compute)
    spec, kinds = parse_spec(sliding).with_options(sinks=0), facts.types
    windows = [x.get("sliding_window", 0) for x in facts.options]
    found = {w for w, kind in zip(windows, kinds, strict=True) if kind == SLIDING}
    why = f"{sorted(_OTHERS & set(kinds))[0]!r} layers" if _OTHERS & set(kinds) else ""
    why = why or ("layers with latents (MLA)" if facts.latent_widths else "")
    why = why or ("cross-attention" if crosses else "")
    why = why or ("windows of unlike size" if len(found) > 1 else "")
    why = f"has {why}" if why else "has no layer with sliding attention" if not found else ""
    if why:
        raise KVPactError(
            f"sliding= packs layers with sliding attention alone, and this model {why}: leave it "
            "out, and such layers stay as transformers caches them"
        )
    (window,) = found
    exact = max(spec.key.window, spec.value.window)
    if exact >= window - 1:
        raise SpecError(
            f"sliding={str(sliding)!r} keeps the last {exact} tokens exact, and the model's window "
            f"is of {window}: nothing would be packed; name a smaller window=, or leave it out"
        )
    specs = [spec] * kinds.count(SLIDING)
    return SharedState(config, exact_new, specs, compute, offsets, window=window)


class RingTokens(NewTokens):
    """The tokens of one `update` of a layer with sliding attention; counted as they are held."""

    __slots__ = ()

    @property
    def unseen(self) -> int:  # type: ignore[override]
        """Tokens held that no query of these sees."""
        return max(self.total - self.k.shape[2] - self.shared.window + 1, 0)

    def as_held(
        self, mask: Tensor | None, kwargs: dict[str, Any]
    ) -> tuple[Tensor | None, dict[str, Any]]:
        """Return a mask of the tokens before the window, too, or the window in its place."""
        kwargs, unseen = {**kwargs, "sliding_window": self.shared.window}, self.unseen
        if kwargs.get("position_bias") is not None:
            raise KVPactError("a bias by positions is not honoured with sliding=; leave that out")
        if mask is None or (mask.shape[2] > 1 and hides_as_window(mask, self.shared.window)):
            return None, kwargs
        if mask.dtype == torch.bool and mask.shape[2] == 1 and bool(mask.all()):
            return None, kwargs  # one query, which sees its window: a step
        hidden = False if mask.dtype == torch.bool else torch.finfo(mask.dtype).min
        return torch.nn.functional.pad(mask, (unseen, 0), value=hidden), kwargs

    def attend(self, q: Tensor, config: AttendConfig) -> Tensor:
        """See `NewTokens`; then drop what no query to come sees."""
        output = super().attend(q, config)
        if not self.shared.recording and isinstance(self._cache, ContiguousCache):
            keep_last(self._cache.entry(self._layer), self.shared.window - 1)
        return output

    def own_padding(self, padding: Tensor) -> Tensor | None:
        """See `NewTokens`; the padding given here begins with the window."""
        return super().own_padding(torch.where(padding > 0, padding + self.unseen, padding))

    def part(self, side: str) -> Tensor:
        """Return K (``k``) or V (``v``) of the tokens that queries see."""
        return super().part(side)[:, :, self.unseen :]


class CompressedSlidingLayer(CompressedLayer):  # type: ignore[no-untyped-call]
    """A layer with sliding attention, the layer `index` of those that are packed."""

    is_sliding = True
    new_tokens = RingTokens

    def __init__(self, shared: SharedState, index: int, sliding_window: int) -> None:
        super().__init__(shared, index)
        self.sliding_window = sliding_window

    @property
    def record_past(self) -> bool:
        """True if all tokens are kept until the next `crop`, which may then go as far back."""
        return self._shared.recording

    def activate_past_recording(self) -> None:
        """Keep all tokens until the next `crop`."""
        self._shared.recording = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Append tokens `[B, H_kv, S, D or D_v]`; return what stands for those that are seen."""
        if not self.record_past:
            self.drop_unseen()
        return super().update(key_states, value_states, *args, **kwargs)

    def drop_unseen(self) -> None:
        """Forget the tokens that no query to come sees."""
        if (entry := self._entry()) is not None:
            keep_last(entry, self.sliding_window - 1)

    def _entry(self) -> CacheLayer | None:
        """Return the layer of the cache that holds the tokens, all of them stored."""
        cache = self.cache
        return cache.entry(self._index) if isinstance(cache, ContiguousCache) else None

    def lost(self, count: int) -> str:
        """Return why the last `count` tokens can't be removed; "" where they can."""
        kept = self.get_seq_length() - self.begin - count
        if not self.begin or kept >= self.sliding_window - 1:
            return ""
        return f"tokens before the window of {self.sliding_window} are no longer held"

    def cut_to(self, length: int) -> None:
        """Forget the tokens from `length` on, if `lost` allows it, and unseen ones."""
        if (entry := self._entry()) is not None:
            entry.truncate(max(length - self.begin, 0))
        self.drop_unseen()

    @property
    def begin(self) -> int:
        """The number of tokens dropped in front."""
        cache = self._shared.held[self._index]
        return cache.entry(self._index)._held.begin if isinstance(cache, ContiguousCache) else 0

    def get_seq_length(self) -> int:
        """Tokens seen, also those that were dropped."""
        return self.begin + super().get_seq_length()

    def get_mask_sizes(self, query_length: int | Tensor) -> tuple[int, int]:
        """Length and offset of the keys that the next update returns."""
        seen = self.get_seq_length()
        kept = min(seen, self.sliding_window - 1)
        return kept + new_tokens(query_length), seen - kept

    def get_max_length(self) -> int:
        """The window."""
        return self.sliding_window

    @property
    def packed_ring(self) -> Tensor | None:
        """The layer's state, as bytes `[B, n]` to go on with; None before the first tokens."""
        entry, cache = self._entry(), self.cache
        if entry is None or cache is None or not entry.length:
            return None
        return packed_ring(entry, cache.geometry)

    def _whole(self, side: str) -> Tensor | None:
        whole = super()._whole(side)
        kept = self.sliding_window - 1
        return whole if whole is None else whole[:, :, max(whole.shape[2] - kept, 0) :]
