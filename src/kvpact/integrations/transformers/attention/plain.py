"""Attention over plain K and V: those of layers that stay as transformers caches them.

It is what ``sdpa`` computes. Prompts of a `CompressedCache` go through kvpact's own kernel, which
skips what lies before a window, where ``sdpa`` computes all and hides it. For other caches it is
``sdpa``, to the bit.
"""

from __future__ import annotations

import threading
import weakref
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kvpact.contract import AttendConfig
from kvpact.kernels import covering_new

LEAST_QUERIES = 96
"""Queries from which the native kernel takes a prompt: it is quicker than ``sdpa`` from 64 on, but
while a cache's first tokens wait, it is an exact one to the bit."""
_BLOCK = 256  # rows of a mask that are compared at once
_given = threading.local()
"""`key`: of the last prompt that this thread gave to a layer which transformers caches."""


def note_prompt(key: Tensor) -> None:
    """Note K of all tokens that attention is about to get."""
    _given.key = weakref.ref(key)


def is_noted(key: Tensor) -> bool:
    """Return whether K is the one noted last."""
    last = getattr(_given, "key", None)
    return last is not None and last() is key


def needs_own(kwargs: dict[str, Any]) -> bool:
    """Return whether plain tensors come with something that ``sdpa`` can't do."""
    return kwargs.get("softcap") is not None or kwargs.get("s_aux") is not None


def config_of(
    mask: Tensor | None, scaling: float | None, is_causal: bool, kwargs: dict[str, Any], **own: Any
) -> AttendConfig:
    """Return how to attend, of the arguments of transformers' interface."""
    return AttendConfig(
        softmax_scale=scaling,
        softcap=kwargs.get("softcap"),
        sink_logits=kwargs.get("s_aux"),
        # Where there is a mask, the window is in it.
        sliding_window=kwargs.get("sliding_window") if mask is None else None,
        mask=_with_bias(mask, kwargs.get("position_bias")),
        is_causal=mask is None and is_causal,
        **own,
    )


def _with_bias(mask: Tensor | None, bias: Tensor | None) -> Tensor | None:
    if bias is None or mask is None:
        return mask if bias is None else bias
    if mask.dtype == torch.bool:
        return torch.where(mask, bias, torch.finfo(bias.dtype).min)
    return mask + bias


def plain_config(
    query: Tensor,
    key: Tensor,
    mask: Tensor | None,
    scaling: float | None,
    is_causal: bool,
    kwargs: dict[str, Any],
) -> AttendConfig:
    """Return how to attend to plain tensors: a mask that hides what a window does is a window."""
    if mask is None or mask.shape[2:] != (query.shape[2], key.shape[2]):
        return config_of(mask, scaling, is_causal, kwargs)
    hides = hides_as_window(mask, kwargs.get("sliding_window"))
    return config_of(None if hides else mask, scaling, hides or is_causal, kwargs)


def quick_config(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scaling: float | None,
    is_causal: bool,
    kwargs: dict[str, Any],
) -> AttendConfig | None:
    """Return how the native kernel attends to a prompt; None where ``sdpa`` has to."""
    new, total = query.shape[2], key.shape[2]
    if not query.device.type == key.device.type == "cpu":
        return None
    if kwargs.get("position_bias") is not None or kwargs.get("output_attentions"):
        return None
    if torch.is_grad_enabled() and any(x.requires_grad for x in (query, key, value)):
        return None
    if not query.dtype == key.dtype == value.dtype or covering_new(key, value).kind != "cpu":
        return None
    if mask is not None:
        config = plain_config(query, key, mask, scaling, is_causal, kwargs)
        return config if config.mask is None else None
    # Without a mask `sdpa` takes no notice of a window.
    causal = is_causal and new == total
    return AttendConfig(softmax_scale=scaling, is_causal=True) if causal else None


class _Window(NamedTuple):
    """The last mask that was asked about, and the answer."""

    mask: weakref.ref[Tensor]
    version: int
    window: int
    hides: bool


_last: _Window | None = None


def hides_as_window(mask: Tensor, window: int | None) -> bool:
    """Return whether a mask `[B, H, q_len, T]` hides what causality and a window do, and no more.

    Layers of a kind share a mask, so the last answer is kept; it costs a read of the mask.
    """
    global _last
    if mask.dtype != torch.bool or mask.dim() != 4 or mask.shape[2] > mask.shape[3]:
        return False
    new, total = mask.shape[2:]
    window = window or total
    version = 0 if mask.is_inference() else mask._version
    last = _last
    if last is not None and last.mask() is mask and last[1:3] == (version, window):
        return last.hides
    columns, hides = torch.arange(total, dtype=torch.int64, device=mask.device), True
    for start in range(0, new, _BLOCK):
        at = columns[total - new :][start : start + _BLOCK, None]
        seen = (columns <= at) & (columns > at - window)
        part = mask[:, :, start : start + _BLOCK]
        hides = hides and torch.equal(part, seen.expand_as(part))
    _last = _Window(weakref.ref(mask), version, window, hides)
    return hides
