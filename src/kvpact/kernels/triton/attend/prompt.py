"""Attention of exact new tokens to each other, by torch's own flash attention.

A prompt without a past is nothing else. A chunk over a past is in part: what flash attention finds
is one more part of its output, which `merge.py` weighs by its log-sum-exp.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from kvpact.kernels.base import AttendCall
from kvpact.kernels.triton.tuning import LEAST_CHUNK

_HALVES = (torch.float16, torch.bfloat16)
_MOST_DIM = 256


def _flash_knows(call: AttendCall) -> bool:
    """Return whether flash attention takes a call's new tokens, in their dtype: not fp32."""
    _, k, v, q, config, _, latent = call
    if k is None or v is None or latent or q.shape[2] != k.shape[2]:
        return False
    if config.mask is not None or config.softcap is not None:
        return False
    dims = {k.shape[3], v.shape[3]}
    fits = len(dims) == 1 and max(dims) <= _MOST_DIM and max(dims) % 8 == 0
    return fits and q.dtype in _HALVES and q.dtype is k.dtype is v.dtype


def is_plain_prompt(call: AttendCall) -> bool:
    """Return whether a call is nothing but exact tokens, each attending to those before it."""
    config = call.config
    rules = (call.view, call.padding, config.sliding_window, config.sink_logits)
    return all(rule is None for rule in rules) and _flash_knows(call)


def is_chunk(call: AttendCall) -> bool:
    """Return whether a call's new tokens are apart from its past: many, all seeing all before."""
    window, padding = call.config.sliding_window, call.padding
    if call.view is None or call.new < LEAST_CHUNK or not _flash_knows(call):
        return False
    if window is not None and window < call.new:
        return False
    if padding is not None and (padding.is_cuda or int(padding.max()) > call.held):
        return False
    return not call.q.is_cuda or torch.backends.cuda.is_flash_attention_available()


def attend_prompt(call: AttendCall) -> Tensor:
    """Attend over a call that `is_plain_prompt`: `[B, H_q, T, D_v]`."""
    assert call.k is not None and call.v is not None
    config = call.config
    return torch.nn.functional.scaled_dot_product_attention(
        call.q,
        call.k,
        call.v,
        is_causal=config.is_causal,
        scale=config.softmax_scale,
        enable_gqa=call.q.shape[1] != call.k.shape[1],
    )


class PromptTokens(NamedTuple):
    """New tokens to each other: `output` `[B, H_q, q_len, D_v]`, `lse` fp32, natural logarithms."""

    output: Tensor
    lse: Tensor


def attend_new(calls: Sequence[AttendCall], scale: float) -> PromptTokens:
    """Attend over the new tokens of calls that are chunks of one kind; `scale`: on logits."""
    aten = torch.ops.aten
    causal = {call.config.is_causal for call in calls}
    if len(causal) > 1:
        made = [attend_new((call,), scale) for call in calls]
        return PromptTokens(*(torch.cat(part) for part in zip(*made, strict=True)))
    parts: list[Tensor] = []
    for given in zip(*((call.q, call.k, call.v) for call in calls), strict=True):
        x = given[0] if len(given) == 1 else torch.cat(given)
        parts.append(x if x.stride(3) == 1 else x.contiguous())
    flash = aten._scaled_dot_product_flash_attention
    if not parts[0].is_cuda:
        flash = aten._scaled_dot_product_flash_attention_for_cpu
    output, lse, *_ = flash(*parts, 0.0, causal.pop(), scale=scale)
    return PromptTokens(output, lse)
