"""The attention function ``kvpact``: over packed slots where K and V are handles.

For any other K and V it does what transformers' ``sdpa`` does.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from kvpact.contract import AttendConfig
from kvpact.errors import KVPactError
from kvpact.integrations.transformers.fallback import say_once
from kvpact.integrations.transformers.handles import KVHandle, refuse_gradients, untraced
from kvpact.integrations.transformers.latent import meet_class
from kvpact.integrations.transformers.shared import Asked
from kvpact.integrations.transformers.tokens import NewTokens, read_before_stored
from kvpact.kernels import attend_exact

ATTENTION = "kvpact"
HONOURED = frozenset({"position_bias", "position_ids", "s_aux", "sliding_window", "softcap"})
"""Arguments by name that are taken into account, besides those of `attention_forward`."""
HARMLESS = frozenset(
    {
        "cache_params",
        "deterministic",
        "encoder_hidden_states",
        "input_ids",
        "inputs_embeds",
        "logits_to_keep",
        "mm_token_type_ids",
        "num_items_in_batch",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "past_key_values",
        "position_embeddings",
        "return_dict",
        "token_type_ids",
        "use_cache",
    }
)
"""Arguments by name that models hand down and that change nothing of attention."""
_KNOWN = HONOURED | HARMLESS


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
    """Compute attention as transformers' interface asks for it; the weights never exist.

    Raises `KVPactError` in training, and for an argument that is not known to be honoured.
    """
    if not kwargs.keys() <= _KNOWN:
        _refuse_others(kwargs)
    tokens = fresh = None
    if isinstance(key, KVHandle) and isinstance(value, KVHandle):
        tokens = key.pending
    else:
        meet_class(module)
        fresh = read_before_stored(key)
    compressed = tokens is not None or fresh is not None
    if compressed and module.training:
        raise KVPactError("a compressed cache is for inference; call model.eval() first")
    if fresh is not None and fresh.whole and fresh.total == query.shape[2]:  # the first ones
        fresh.tell_of_bias(module)
        if needs_own(kwargs):
            fresh.shared.may_wait, tokens = False, fresh
    if fresh is not None and tokens is None:
        padding = _own_padding(fresh, attention_mask)
        if padding is not None or not fresh.whole:
            fresh.store(padding)
    last = attention_mask is None and 1 < query.shape[2] < key.shape[2]
    # Layers that share K and V may leave out queries, and `sdpa` takes those left for the first.
    last = last and getattr(module, "is_kv_shared_layer", False)
    if tokens is None and not last and not needs_own(kwargs):
        output: Tensor = sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout, scaling, is_causal, **kwargs
        )[0]
        return (_without_gradient(query, output) if compressed else output), None
    if kwargs.get("output_attentions"):
        say_once(
            "output_attentions",
            "attention weights never exist with a compressed cache; None is returned for them",
        )
    if is_causal is None:
        is_causal = getattr(module, "is_causal", True)
    if tokens is not None:
        origin = tokens if isinstance(tokens, NewTokens) else tokens.origin
        if origin.total == origin.k.shape[2]:  # the first ones
            origin.tell_of_bias(module)
        config = call_config(origin, attention_mask, scaling, is_causal, kwargs)
        output = tokens.attend(query, config)
    else:
        config = _config(attention_mask, scaling, is_causal, kwargs)
        output = attend_exact(key, value, query, config)
    if query.requires_grad and compressed:
        output = _without_gradient(query, output)
    return output.transpose(1, 2).contiguous(), None


def _refuse_others(kwargs: dict[str, Any]) -> None:
    """Raise if an argument says something about attention that would be ignored."""
    others = kwargs.keys() - _KNOWN
    given = [name for name in others if kwargs[name] is not None and kwargs[name] is not False]
    if given:
        raise KVPactError(
            f"this model passes {', '.join(map(repr, sorted(given)))} to attention, which "
            "'kvpact' does not honour: call model.set_attn_implementation('sdpa'), and make "
            "caches with CompressedCache(model, spec, attention='keep')"
        )


def _config(
    mask: Tensor | None,
    scaling: float | None,
    is_causal: bool,
    kwargs: dict[str, Any],
    padding: Tensor | None = None,
    exact_new: bool = True,
    origin: Tensor | None = None,
) -> AttendConfig:
    return AttendConfig(
        softmax_scale=scaling,
        softcap=kwargs.get("softcap"),
        sink_logits=kwargs.get("s_aux"),
        # Where there is a mask, the window is in it.
        sliding_window=kwargs.get("sliding_window") if mask is None else None,
        mask=_with_bias(mask, kwargs.get("position_bias")),
        is_causal=mask is None and is_causal,
        padding=padding,
        exact_new=exact_new,
        origin=origin,
    )


def call_config(
    tokens: NewTokens,
    mask: Tensor | None,
    scaling: float | None,
    is_causal: bool,
    kwargs: dict[str, Any],
) -> AttendConfig:
    """Return how to attend, made once for all layers and steps that are called alike."""
    shared, get = tokens.shared, kwargs.get
    version = 0 if mask is None or mask.is_inference() else mask._version
    plain = scaling, is_causal, get("softcap"), get("sliding_window"), version
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
    config = _config(mask, scaling, is_causal, kwargs, padding, shared.exact_new, origin)
    shared.asked = Asked(plain, mask, sinks, bias, config)
    return config


def _own_padding(tokens: NewTokens, mask: Tensor | None) -> Tensor | None:
    left = left_padding(mask)
    return None if left is None else tokens.own_padding(left)


def _without_gradient(query: Tensor, output: Tensor) -> Tensor:
    tracked = torch.is_grad_enabled() and query.requires_grad
    return refuse_gradients(output) if tracked else output


def needs_own(kwargs: dict[str, Any]) -> bool:
    """Whether plain tensors come with something that ``sdpa`` can't do."""
    return kwargs.get("softcap") is not None or kwargs.get("s_aux") is not None


def _with_bias(mask: Tensor | None, bias: Tensor | None) -> Tensor | None:
    if bias is None or mask is None:
        return mask if bias is None else bias
    if mask.dtype == torch.bool:
        return torch.where(mask, bias, torch.finfo(bias.dtype).min)
    return mask + bias


def left_padding(mask: Tensor | None) -> Tensor | None:
    """Return `[B]`: first tokens of each row that no query may see; None where there are none."""
    if mask is None:
        return None
    seen = mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min / 2
    columns = seen.flatten(1, 2).any(1)
    first = columns.int().argmax(1)
    first = torch.where(columns.any(1), first, torch.full_like(first, mask.shape[-1]))
    return first if first.any() else None
