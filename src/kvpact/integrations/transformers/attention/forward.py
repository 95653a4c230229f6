"""The attention function ``kvpact``, and the loans by which models use it while caches exist.

Over packed slots where K and V are handles; for any other K and V it does what ``sdpa`` does.
"""

from __future__ import annotations

import inspect
import sys
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from inspect import signature
from typing import Any

import torch
from torch import Tensor
from torch.autograd import profiler
from transformers import AttentionInterface, Cache
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from kvpact.contract import AttendConfig
from kvpact.errors import KVPactError, SpecError
from kvpact.integrations.transformers.attention.plain import (
    LEAST_QUERIES,
    config_of,
    is_noted,
    needs_own,
    plain_config,
    quick_config,
)
from kvpact.integrations.transformers.held.handles import KVHandle, refuse_gradients, untraced
from kvpact.integrations.transformers.held.new_tokens import NewTokens
from kvpact.integrations.transformers.held.paged_tokens import PagedTokens
from kvpact.integrations.transformers.held.shared import Asked
from kvpact.integrations.transformers.held.waiting import read_before_stored
from kvpact.integrations.transformers.layers.indexed import chosen
from kvpact.integrations.transformers.layers.latent import meet_class
from kvpact.integrations.transformers.model.fallback import say_once
from kvpact.integrations.transformers.versions import (
    CACHE,
    PreTrainedConfig,
    check_index,
    modeling_module,
)
from kvpact.kernels import attend_exact

ATTENTION = "kvpact"
HONOURED = frozenset(
    {
        "block_indices",
        "indices",
        "position_bias",
        "position_ids",
        "s_aux",
        "sliding_window",
        "softcap",
    }
)
"""Arguments by name that are taken into account, besides those of `attention_forward`."""
OF_EAGER = frozenset({"sinks"})
"""Arguments that models honour which have no ``sdpa``, and are not taken into account."""


def register_attention() -> None:
    """Make ``attn_implementation="kvpact"`` known to transformers; may be called often."""
    AttentionInterface.register(ATTENTION, attention_forward)
    # Without a mask function of that name the mask would silently be None.
    AttentionMaskInterface.register(ATTENTION, sdpa_mask)


@untraced
def attention_forward(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attend as transformers' interface asks for it; new tokens of a refused call are dropped."""
    tokens = fresh = None
    if hasattr(kwargs.get("cache"), "loan"):  # a pool; up to transformers 5.23 it is updated here
        key, value = kwargs.pop("cache").update(key, value, module.layer_idx, kwargs)
    if isinstance(key, KVHandle) and isinstance(value, KVHandle):
        tokens = key.pending
        if isinstance(tokens, PagedTokens):
            output: Tensor = tokens.attend(query, config_of(None, scaling, True, kwargs))
            return output.transpose(1, 2), None
    else:
        meet_class(module)
        fresh = read_before_stored(key)
    compressed, seen, new = tokens is not None or fresh is not None, attention_mask, query.shape[2]
    try:
        if not _REFUSED.isdisjoint(kwargs):
            _refuse_others(kwargs, compressed)
        if compressed and dropout and module.training:
            raise KVPactError(
                "attention over a compressed cache has no dropout: call model.eval(), or set the "
                f"dropout of attention, {dropout}, to 0"
            )
        if kwargs.get("indices") is not None or kwargs.get("block_indices") is not None:
            check_index()
            attention_mask = chosen(module, seen, new, key.shape[2], kwargs)
        if fresh is not None and fresh.whole and fresh.total == new:  # the first ones
            fresh.tell_of_bias(module)
            if needs_own(kwargs):
                fresh.shared.may_wait, tokens = False, fresh
        if fresh is not None and tokens is None:
            padding = _own_padding(fresh, seen)
            if padding is not None or not fresh.whole:
                fresh.store(padding)
        last = attention_mask is None and 1 < new < key.shape[2]
        # Layers that share K and V may leave out queries, and `sdpa` takes those left for the
        # first.
        last = last and getattr(module, "is_kv_shared_layer", False)
        if tokens is None and not last and not needs_own(kwargs):
            if new >= LEAST_QUERIES and not dropout and is_noted(key):
                causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
                quick = quick_config(query, key, value, attention_mask, scaling, causal, kwargs)
                if quick is not None:
                    return attend_exact(key, value, query, quick).transpose(1, 2), None
            output = sdpa_attention_forward(
                module, query, key, value, attention_mask, dropout, scaling, is_causal, **kwargs
            )[0]
            return (_without_gradient(query, output) if compressed else output), None
        if kwargs.get("output_attentions"):
            say_once(
                "output_attentions",
                "attention 'kvpact' returns no weights, as 'sdpa' returns none: "
                "model.set_attn_implementation('eager') has them, of decompressed K and V",
                module,
            )
        if is_causal is None:
            is_causal = getattr(module, "is_causal", True)
        if tokens is not None:
            origin = tokens if isinstance(tokens, NewTokens) else tokens.origin
            if origin.shared.heap.active:
                origin.shared.heap.until(kwargs.get("position_ids"))
            if origin.total == origin.k.shape[2]:  # the first ones
                origin.tell_of_bias(module)
            config = call_config(origin, attention_mask, scaling, is_causal, kwargs)
            if profiler._is_profiler_enabled:
                with profiler.record_function("kvpact::attend"):
                    output = tokens.attend(query, config)
            else:
                output = tokens.attend(query, config)
        else:
            config = plain_config(query, key, attention_mask, scaling, is_causal, kwargs)
            output = attend_exact(key, value, query, config)
    except BaseException:
        if compressed:
            _drop(tokens or fresh, new)
        raise
    if query.requires_grad and compressed:
        output = _without_gradient(query, output)
    return output.transpose(1, 2).contiguous(), None


def _refuse_others(kwargs: dict[str, Any], compressed: bool) -> None:
    """Raise if an argument asks something of attention that would be ignored."""
    if CACHE != "cache" and isinstance(kwargs.get("cache"), Cache):
        raise KVPactError(f"this transformers calls a cache {CACHE}: pass {CACHE}=cache")
    names = _OF_SDPA | OF_EAGER if compressed else OF_EAGER
    given = [name for name in sorted(names) if kwargs.get(name) is not None]
    if given:
        raise KVPactError(
            f"this model passes {', '.join(map(repr, given))} to attention, which 'kvpact' does "
            "not honour: call model.set_attn_implementation('sdpa'), and make caches with "
            "CompressedCache(model, spec, attention='keep')"
        )


_OF_SDPA = signature(sdpa_attention_forward).parameters.keys() - HONOURED
_OF_SDPA -= signature(attention_forward).parameters.keys()
"""Arguments of a later ``sdpa``: of others than its own it takes no notice, and nor does this."""
_REFUSED = _OF_SDPA | OF_EAGER | ({"cache"} - {CACHE})


def _drop(tokens: Any, new: int) -> None:
    """Forget the last `new` tokens where they wait: the call of the model ends with an error."""
    origin = tokens if isinstance(tokens, NewTokens) else tokens.origin
    origin.cut(origin.total - new)


def call_config(
    tokens: NewTokens,
    mask: Tensor | None,
    scaling: float | None,
    is_causal: bool,
    kwargs: dict[str, Any],
) -> AttendConfig:
    """Return how to attend, made once for all layers and steps that are called the same way."""
    shared, get = tokens.shared, kwargs.get
    version = 0 if mask is None or mask.is_inference() else mask._version
    plain = scaling, is_causal, get("softcap"), get("sliding_window"), version, tokens.unseen
    sinks, bias, known = get("s_aux"), get("position_bias"), shared.asked
    if (
        known is not None
        and known.plain == plain
        and known.mask is mask
        and known.sink_logits is sinks
        and known.bias is bias
    ):
        return known.config
    padding = _own_padding(tokens, mask)
    origin = tokens.origins(get("position_ids"), padding)
    held, kwargs = tokens.as_held(mask, kwargs)
    sparse = shared.indexed and held is not None  # an index has narrowed it
    own = {"padding": padding, "exact_new": shared.exact_new, "origin": origin, "sparse": sparse}
    config = config_of(held, scaling, is_causal, kwargs, **own)
    shared.asked = Asked(plain, mask, sinks, bias, config)
    return config


def _own_padding(tokens: NewTokens, mask: Tensor | None) -> Tensor | None:
    if tokens.shared.indexed and tokens.total > tokens.k.shape[2]:
        return None  # what no query sees now was perhaps not chosen
    left = left_padding(mask)
    return None if left is None else tokens.own_padding(left)


def _without_gradient(query: Tensor, output: Tensor) -> Tensor:
    tracked = torch.is_grad_enabled() and query.requires_grad
    return refuse_gradients(output) if tracked else output


def left_padding(mask: Tensor | None) -> Tensor | None:
    """Return `[B]`: first tokens of each row that no query may see; None where there are none."""
    if mask is None:
        return None
    seen = mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min / 2
    columns = seen.flatten(1, 2).any(1)
    first = columns.int().argmax(1)
    first = torch.where(columns.any(1), first, torch.full_like(first, mask.shape[-1]))
    return first if first.any() else None


class Loan:
    """A handle that caches hold while a config's attention is ``kvpact``; its end restores it."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Loan:
        return self


class _Lent(str):
    """The attention's name while it is lent; copied or pickled, it is what stood there before."""

    __slots__ = ("before",)
    before: str | None

    def __reduce__(self) -> tuple[Any, ...]:
        return (type(None), ()) if self.before is None else (str, (self.before,))


_loans: weakref.WeakValueDictionary[int, Loan] = weakref.WeakValueDictionary()
_before: dict[int, str | None] = {}
# A cache may be freed in one thread while another makes one for the same config, and the garbage
# collector frees some within these very functions.
_lock = threading.RLock()


def _lent(config: PreTrainedConfig) -> Loan:
    loan = _loans.get(id(config))
    if loan is None:
        loan = _loans[id(config)] = Loan()
        _before.setdefault(id(config), config._attn_implementation)
        weakref.finalize(loan, _give_back, config).atexit = False
    config._attn_implementation = name = _Lent(ATTENTION)
    name.before = _before[id(config)]
    return loan


def _give_back(config: PreTrainedConfig) -> None:
    with _lock:
        if id(config) in _loans:  # lent again before this was called
            return
        before = _before.pop(id(config), None)
        if config._attn_implementation == ATTENTION:
            config._attn_implementation = before


@contextmanager
def given_back(config: PreTrainedConfig) -> Iterator[None]:
    """Let a config have its own attention during the context, for code that asks for its name."""
    with _lock:
        lent, before = config._attn_implementation, _before.get(id(config))
        stand_in = before or ("sdpa" if lent == ATTENTION else lent)
        config._attn_implementation = stand_in
        try:
            yield
        finally:
            if config._attn_implementation == stand_in:
                config._attn_implementation = lent


@lru_cache(maxsize=256)
def _attends_itself(module: str) -> tuple[bool, bool]:
    """Return whether a model's code has attention of its own, and whether it asks for its name."""
    try:
        source = inspect.getsource(sys.modules[module])
    except (KeyError, OSError, TypeError):
        return False, False
    own = "ALL_ATTENTION_FUNCTIONS" not in source
    return own and "Attention(nn.Module)" in source, own and "._attn_implementation ==" in source


def choose_attention(config: PreTrainedConfig, attention: str, sparse: bool = False) -> Loan | None:
    """Make ``kvpact`` the config's attention until the `Loan` returned ends; None if unchanged."""
    if attention not in ("auto", "keep"):
        raise SpecError(f"attention should be 'auto' or 'keep', not {attention!r}")
    with _lock:
        return _chosen(config, attention, sparse)


def _chosen(config: PreTrainedConfig, attention: str, sparse: bool) -> Loan | None:
    lent = id(config) in _before  # asked first: a loan may end at any moment, but none begins
    current = config._attn_implementation
    itself, by_name = _attends_itself(modeling_module(config))
    if by_name and current == ATTENTION:
        raise KVPactError(
            "this model computes attention by itself and knows 'sdpa' by name; with 'kvpact' "
            "it would not be causal: load it with attention 'sdpa'"
        )
    if sparse and current == ATTENTION:
        raise KVPactError(
            "layers of this model attend to streams that it compresses itself, which 'kvpact' does "
            "not honour: call model.set_attn_implementation('sdpa')"
        )
    if attention == "keep":
        return None
    if sparse:
        say_once(
            "sparse",
            "layers of this model attend to streams that it compresses itself, which works with "
            f"attention {current!r} and not with 'kvpact': K and V are read decompressed",
            config,
        )
    elif by_name or (itself and current not in ("sdpa", None)):
        say_once(
            "decompressed",
            "this model computes attention by itself: K and V are decompressed for it in every "
            "step, which is right, but slower and with a whole layer in memory",
            config,
        )
    elif (lent and current == ATTENTION) or current in ("sdpa", None):
        return _lent(config)
    elif current != ATTENTION:
        say_once(
            "decompressed",
            f"the model's attention is {current!r}, which will read decompressed K and V; "
            "model.set_attn_implementation('kvpact') attends over the compressed cache",
            config,
        )
    return None
