"""The attention function ``kvpact``: over packed slots where K and V are handles.

For any other K and V it does what transformers' ``sdpa`` does.
"""

from __future__ import annotations

import inspect
import sys
import weakref
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, PreTrainedConfig
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from kvpact.contract import AttendConfig
from kvpact.errors import KVPactError, SpecError
from kvpact.integrations.transformers.handles import KVHandle, say_once
from kvpact.integrations.transformers.latent import read_before_stored
from kvpact.kernels import attend_exact

ATTENTION = "kvpact"


def register_attention() -> None:
    """Make ``attn_implementation="kvpact"`` known to transformers; may be called often."""
    AttentionInterface.register(ATTENTION, attention_forward)
    # Without a mask function of that name the mask would silently be None.
    AttentionMaskInterface.register(ATTENTION, sdpa_mask)


class Loan:
    """Held by the caches for which a config's attention is ``kvpact``; what it was comes back."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Loan:
        return self


_loans: weakref.WeakValueDictionary[int, Loan] = weakref.WeakValueDictionary()


def _lent(config: PreTrainedConfig) -> Loan:
    loan = _loans.get(id(config))
    if loan is None:
        loan = _loans[id(config)] = Loan()
        before = config._attn_implementation
        weakref.finalize(loan, _give_back, config, before).atexit = False
    config._attn_implementation = ATTENTION
    return loan


def _give_back(config: PreTrainedConfig, attention: str | None) -> None:
    if config._attn_implementation == ATTENTION:
        config._attn_implementation = attention


@lru_cache(maxsize=256)
def _asks_by_name(module: str) -> bool:
    """Whether a model's code compares the name of its attention instead of looking it up."""
    try:
        source = inspect.getsource(sys.modules[module])
    except (KeyError, OSError, TypeError):
        return False
    return "._attn_implementation ==" in source and "ALL_ATTENTION_FUNCTIONS" not in source


def choose_attention(config: PreTrainedConfig, attention: str, sparse: bool = False) -> Loan | None:
    """Register ``kvpact`` and make it the config's attention in place of ``sdpa``.

    Parameters
    ----------
    config : PreTrainedConfig
        The decoder's.
    attention : {"auto", "keep"}
        ``keep`` leaves the config alone.
    sparse : bool
        Whether some layers choose the tokens that they attend to. They say so in a mask only under
        ``sdpa`` and ``eager``, so the config is left alone.

    Returns
    -------
    Loan or None
        For the cache to hold: when the last cache of a config is gone, its attention is again what
        it was. None where the config was left alone.

    Raises
    ------
    SpecError
        `attention` is neither.
    KVPactError
        The attention is ``kvpact``, but the model's code knows ``sdpa`` by name only.
    """
    if attention not in ("auto", "keep"):
        raise SpecError(f"attention should be 'auto' or 'keep', not {attention!r}")
    register_attention()
    current = config._attn_implementation
    if sparse and attention == "auto":
        say_once(
            "sparse",
            "layers of this model choose the tokens they attend to, which works with attention "
            f"{current!r} and not with 'kvpact': the compressed layers are read decompressed",
        )
        return None
    if _asks_by_name(type(config).__module__.replace(".configuration_", ".modeling_")):
        if current == ATTENTION:
            raise KVPactError(
                "this model computes attention by itself and knows 'sdpa' by name; with 'kvpact' "
                "it would not be causal: load it with attention 'sdpa'"
            )
        if attention == "auto":
            say_once(
                "decompressed",
                "this model computes attention by itself: K and V are decompressed for it in every "
                "step, which is right, but slower and with a whole layer in memory",
            )
        return None
    if attention == "auto" and (current in ("sdpa", None) or id(config) in _loans):
        return _lent(config)
    if attention == "auto" and current != ATTENTION:
        say_once(
            "decompressed",
            f"the model's attention is {current!r}, which will read decompressed K and V; "
            "model.set_attn_implementation('kvpact') attends over the compressed cache",
        )
    return None


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
    """Compute attention as transformers' interface asks for it.

    Parameters
    ----------
    module : torch.nn.Module
        The attention layer.
    query, key, value : Tensor
        `[B, H_q, S, D]`, `[B, H_kv, T, D]`, `[B, H_kv, T, D_v]`; handles or tensors.
    attention_mask : Tensor or None
        `[B, 1 or H_q, S, T]`, boolean or additive.
    dropout, scaling, is_causal
        As in transformers; dropout is for training, which is refused.
    **kwargs
        ``softcap``, ``s_aux`` (sink logits), ``sliding_window`` and ``position_bias`` are
        honoured.

    Returns
    -------
    tuple
        Output `[B, S, H_q, D_v]`, and None for the weights, which never exist.

    Raises
    ------
    KVPactError
        Training with a compressed cache.
    """
    handles = isinstance(key, KVHandle) and isinstance(value, KVHandle)
    fresh = None if handles else read_before_stored(module, key)
    if fresh is not None:
        _check_inference(module)
        fresh.settle(left_padding(attention_mask))
    if not handles and not _needs_own(kwargs):
        output: Tensor = sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout, scaling, is_causal, **kwargs
        )[0]
        return (output if fresh is None else _without_gradient(query, output)), None
    if handles:
        _check_inference(module)
    if kwargs.get("output_attentions"):
        say_once(
            "output_attentions",
            "attention weights never exist with a compressed cache; None is returned for them",
        )
    if is_causal is None:
        is_causal = getattr(module, "is_causal", True)
    config = AttendConfig(
        softmax_scale=scaling,
        softcap=kwargs.get("softcap"),
        sink_logits=kwargs.get("s_aux"),
        # Where there is a mask, the window is in it.
        sliding_window=kwargs.get("sliding_window") if attention_mask is None else None,
        mask=_with_bias(attention_mask, kwargs.get("position_bias"), is_causal),
        is_causal=attention_mask is None and is_causal,
        padding=left_padding(attention_mask) if handles else None,
    )
    if isinstance(key, KVHandle) and isinstance(value, KVHandle):
        output = key.pending.attend(query, config)
    else:
        output = attend_exact(key, value, query, config)
    if handles or fresh is not None:
        output = _without_gradient(query, output)
    return output.transpose(1, 2).contiguous(), None


def _check_inference(module: torch.nn.Module) -> None:
    if module.training:
        raise KVPactError("a compressed cache is for inference; call model.eval() first")


def _without_gradient(query: Tensor, output: Tensor) -> Tensor:
    if torch.is_grad_enabled() and query.requires_grad:
        refusing: Tensor = _NoGradient.apply(query, output)  # type: ignore[no-untyped-call]
        return refusing
    return output


class _NoGradient(torch.autograd.Function):
    """Stands where gradients would have to pass a compressed cache, and refuses them."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, output: Tensor) -> Tensor:
        return output.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        raise KVPactError("there are no gradients through a compressed cache; run without one")


def _needs_own(kwargs: dict[str, Any]) -> bool:
    """Whether plain tensors come with something that ``sdpa`` can't do."""
    return kwargs.get("softcap") is not None or kwargs.get("s_aux") is not None


def _with_bias(mask: Tensor | None, bias: Tensor | None, is_causal: bool) -> Tensor | None:
    if bias is None or mask is None:
        return mask if bias is None else bias
    if mask.dtype == torch.bool:
        return torch.where(mask, bias, torch.finfo(bias.dtype).min)
    return mask + bias


def left_padding(mask: Tensor | None) -> Tensor | None:
    """Return `[B]`: first tokens of each row that no query may see; None where there are none.

    Parameters
    ----------
    mask : Tensor or None
        `[B, 1 or H_q, S, T]`, boolean or additive.
    """
    if mask is None:
        return None
    seen = mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min / 2
    columns = seen.flatten(1, 2).any(1)
    first = columns.int().argmax(1)
    first = torch.where(columns.any(1), first, torch.full_like(first, mask.shape[-1]))
    return first if first.any() else None
