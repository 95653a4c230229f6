"""A prompt without a past: torch's own flash attention is the kernel for that."""

from __future__ import annotations

import torch
from torch import Tensor

from kvpact.kernels.base import AttendCall

_HALVES = (torch.float16, torch.bfloat16)
_MOST_DIM = 256


def is_plain_prompt(call: AttendCall) -> bool:
    """Whether a call is nothing but exact tokens, each of which attends to those before it.

    Flash attention computes in the tokens' dtype, so fp32 is left to the general kernel.
    """
    view, k, v, q, config, padding, latent = call
    if view is not None or k is None or v is None or latent or padding is not None:
        return False
    rules = (config.mask, config.softcap, config.sliding_window, config.sink_logits)
    if any(rule is not None for rule in rules) or q.shape[2] != k.shape[2]:
        return False
    dims = {k.shape[3], v.shape[3]}
    alike = len(dims) == 1 and max(dims) <= _MOST_DIM and max(dims) % 8 == 0
    return alike and q.dtype in _HALVES and q.dtype is k.dtype is v.dtype


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
