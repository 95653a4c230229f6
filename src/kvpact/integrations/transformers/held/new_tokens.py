"""New tokens of one layer, between the model's `update` and the attention that uses them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kvpact.cache import ContiguousCache
from kvpact.cache.checks import DTYPES
from kvpact.cache.layer.moment import Moment
from kvpact.cache.layer.stored import Step
from kvpact.cache.paged.view import PagedView
from kvpact.contract import AttendConfig, DequantResult
from kvpact.errors import KVPactError, StaleResult
from kvpact.integrations.transformers.held.shared import SharedState
from kvpact.integrations.transformers.held.waiting import WaitingTokens
from kvpact.integrations.transformers.model.fallback import say_once
from kvpact.integrations.transformers.model.offsets import tell_of_bias
from kvpact.kernels import AttendCall
from kvpact.kernels.torch.attend import attend


class NewTokens(WaitingTokens):
    """The tokens of one `update`, which a handle stands for; stored when they are first used.

    The attention function knows the padding of each row and `update` does not; so storing waits
    for whichever comes first: attention, which stores nothing if it refuses, decompression, or the
    layer's next call. Other layers that attend to them, too (`again`), see the same past.
    """

    __slots__ = ("_dtypes", "_parts", "_step", "_widths")

    by_steps = False  # true if tokens are stored first, and then attended to (`_over`)

    def __init__(
        self, shared: SharedState, layer: int, k: Tensor, v: Tensor, again: bool = False
    ) -> None:
        self._dtypes = k_dtype, v_dtype = k.dtype, v.dtype
        self._widths = k.shape[3], v.shape[3]
        if k.requires_grad or v.requires_grad:
            k, v = k.detach(), v.detach()
        if v.shape[3] == 0:  # latents of a layer without RoPE (GLM-5): a zero stands for it
            v = v.new_zeros(*v.shape[:3], 1)
        cache = shared.held[layer]
        if cache is None:
            if k_dtype is not v_dtype or k_dtype not in DTYPES:
                k, v = as_stored(k, v, None)
            cache = shared.cache_for(layer, k, v)
        elif not k_dtype is v_dtype is cache.geometry.dtype:
            k, v = as_stored(k, v, cache.geometry.dtype)
        self.k, self.v, self.shared, self._layer, self._cache = k, v, shared, layer, cache
        self.total = cache.seq_len(layer) + k.shape[2]
        self._parts: tuple[Tensor, Tensor] | None = None
        self._again = again
        self._step: Step | None = None
        self._wait = self.expanded = None
        shared.waiting[layer] = self

    unseen = 0  # tokens held that no query of these sees, by how attention slides

    def as_held(
        self, mask: Tensor | None, kwargs: dict[str, Any]
    ) -> tuple[Tensor | None, dict[str, Any]]:
        """Return a mask, and what comes with it, for all tokens that are held."""
        if mask is not None and self.shared.gaps.ranges:
            past = mask[..., : self.total - self.k.shape[2]]
            seen = past if past.dtype == torch.bool else past > torch.finfo(past.dtype).min / 2
            if not bool(seen.all()):
                raise KVPactError(
                    "a mask hides tokens of a cache that has dropped some: leave attention_mask "
                    "out, or evict what it hides"
                )
        return mask, kwargs

    def attend(self, q: Tensor, config: AttendConfig) -> Tensor:
        """Attend over the past and these tokens, and store them; all or nothing."""
        if q.dtype not in DTYPES:
            return self.attend(q.float(), config).to(q.dtype)
        if self.shared.waiting[self._layer] is not self:
            if self._step is not None:
                return self._over(self._step, q, config)
            k, v = self._all()
            latent = self._cache.geometry.latent
            return attend(AttendCall(None, k, v, q, config, config.padding, latent))
        self._use()
        output: Tensor
        try:
            if (self._again or self.by_steps) and isinstance(self._cache, ContiguousCache):
                output = self._stored_step(self._cache, q, config)
            else:
                output = self._cache.attend(self._layer, k=self.k, v=self.v, q=q, config=config)
            return output
        except BaseException:
            self.shared.handles = None  # they refer to these tokens
            raise

    def _over(self, step: Step, q: Tensor, config: AttendConfig) -> Tensor:
        return step.attend(q, config)

    def _stored_step(self, cache: ContiguousCache, q: Tensor, config: AttendConfig) -> Tensor:
        """Attend, and keep what other layers attend to, too."""
        before = Moment.of(cache.entry(self._layer))
        learns = q if self.k.shape[3] else None  # queries that meet the keys held
        step = cache.store(self._layer, k=self.k, v=self.v, config=config, q=learns)
        try:
            output = self._over(step, q, config)
        except BaseException:
            before.restore()
            raise
        self._step = step
        return output

    def store(self, padding: Tensor | None = None) -> DequantResult:
        """Store the tokens; return K and V of all, decompressed when read."""
        self._use()
        self.shared.handles = None  # nothing but the model keeps what is decompressed
        config = AttendConfig(padding=padding, exact_new=self.shared.exact_new)
        try:
            return self._cache.prefill(self._layer, self.k, self.v, None, config)
        except BaseException:
            if self._wait is not None:  # the model has read them: they are held, if not stored
                self.shared.waiting[self._layer] = self
            raise

    def _use(self) -> None:
        # From now on only the handles, which live as long as the model's layer looks at them, keep
        # the exact tokens; those that can't be stored are dropped with the error.
        shared = self.shared
        shared.waiting[self._layer] = None
        if self._layer + 1 == len(shared.waiting):
            shared.end_call()

    def part(self, side: str) -> Tensor:
        """Return K (``k``) or V (``v``) of all tokens, decompressed, in the new ones' dtype."""
        index = 0 if side == "k" else 1
        whole = (self.k, self.v) if self.fresh else self._all()
        return whole[index].to(self._dtypes[index])[..., : self._widths[index]]

    def _all(self) -> tuple[Tensor, Tensor]:
        if self._parts is None:
            if self._unused:
                self._require_one_length()
                result = self.store()
            elif self._step is not None:
                result = self._step.dequantize(None, AttendConfig())
            else:
                self._parts = self._whole("k", self.k), self._whole("v", self.v)
                return self._parts
            self._parts = result.k, result.v
            if self._cache.geometry.latent:  # `c_kv` and `k_rope`: its K is both side by side
                self._parts = result.v, result.k[..., self.k.shape[-1] :]
        return self._parts

    def _whole(self, side: str, new: Tensor) -> Tensor:
        """Return K or V of all tokens, which are stored: the past as it is held now."""
        cache, begin = self._cache, self.total - new.shape[2]
        if isinstance(cache, PagedView):
            raise KVPactError(
                "these tokens were used already: a model that reads K and V of a layer twice can't "
                "run on a paged batch; use CompressedCache"
            )
        if cache.seq_len(self._layer) < self.total:
            raise StaleResult("the cache was rolled back or reset since; call the model again")
        whole = cache.dequantize(self._layer, side)[:, :, : self.total]
        if self.shared.exact_new:
            whole[:, :, begin:] = new
        return whole

    def _lengths(self) -> list[int]:
        """Return the tokens that each row of a paged cache held before these."""
        cache = self._cache
        if not isinstance(cache, PagedView) or cache.seqs is None:
            return []
        return [cache.cache.seq_len(seq, self._layer) for seq in cache.seqs]

    def _require_one_length(self) -> None:
        if len(set(self._lengths())) > 1:
            self._use()
            remedy = "call model.set_attn_implementation('kvpact')"
            if self._cache.geometry.latent:
                remedy += "; 'kv_b_proj' has to be a plain linear layer (no adapter, no hooks)"
            raise KVPactError(
                "rows of unlike length can't be decompressed into one tensor for the model's own "
                f"attention; {remedy}"
            )

    def own_padding(self, padding: Tensor) -> Tensor | None:
        """Return the `[B]` padding that is in each row, unless the cache knows it already."""
        lengths = self._lengths()
        held: int | Tensor = self.total - self.k.shape[2]
        if lengths:
            held = torch.tensor(lengths, dtype=torch.int64, device=padding.device)
            padding = (padding - (held.max() - held)).clamp(min=0)
        # Padding ends with a row's first real token; rows that have one are not looked at again.
        return padding if bool((padding > 0).any() and (padding >= held).any()) else None

    def origins(self, position_ids: Tensor | None, padding: Tensor | None) -> Tensor | None:
        """Return `[B]`, each row's token at position 0; None where padding gives it, or unused."""
        cache = self._cache.cache if isinstance(self._cache, PagedView) else self._cache
        batch, _, new, _ = self.k.shape
        begins = self.total == new
        if not cache.key_offsets or not (begins or padding is not None):
            return None
        if position_ids is None or position_ids.dim() != 2:
            return None
        lengths = [n + new for n in self._lengths()] or [self.total]
        ends = torch.tensor(lengths, dtype=torch.int64, device="cpu")
        found = (ends - 1 - position_ids[:, -1].to("cpu", torch.long)).expand(batch)
        usual = torch.zeros_like(found) if padding is None else padding.cpu()
        return None if torch.equal(found, usual.long()) else found

    def tell_of_bias(self, attention: torch.nn.Module) -> None:
        """Warn on the first tokens if keys have a large bias and no key offsets were given."""
        if isinstance(self._cache, PagedView):
            paged = self._cache.cache
            specs, known = paged.specs, bool(paged.key_offsets)
        else:
            budget, known = self.shared.budget, self.shared.key_offsets is not None
            specs = self.shared.specs if budget is None else list(budget.rungs[-1])
        if not known and specs[self._layer].key.name != "none":
            tell_of_bias(attention)


def as_stored(k: Tensor, v: Tensor, held: torch.dtype | None) -> tuple[Tensor, Tensor]:
    """Return K and V in one dtype that a cache holds: the wider one (autocast), but not float64."""
    dtype = torch.promote_types(k.dtype, v.dtype)
    if dtype is torch.float64:
        say_once("float64", "K and V of dtype float64 are stored and attended to in float32")
        dtype = torch.float32
    if held is not None and torch.promote_types(dtype, held) is held:
        dtype = held
    return k.to(dtype), v.to(dtype)
