"""Attention over packed slots and exact tokens, tile by tile: the definition of the result.

The query is transformed once, the output back once; what is cached stays transformed. Packed
tokens, exact tokens and the new ones meet in one online softmax, so neither the scores nor a
decompressed K or V ever exist for all tokens at once.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvpact.arithmetic import saturated
from kvpact.contract import AttendConfig
from kvpact.kernels.base import AttendCall
from kvpact.kernels.torch.latent import LatentTokens
from kvpact.kernels.torch.logits import LogitRules
from kvpact.kernels.torch.online import OnlineSoftmax
from kvpact.kernels.torch.queries import check_call, query_groups, sink_rows
from kvpact.kernels.torch.tokens import SeparateTokens
from kvpact.kernels.views import CHUNK


def attend(call: AttendCall) -> Tensor:
    """Attend over what a layer holds and over new tokens.

    `call`: the tokens, the queries and how to attend. Returns `[B, H_q, q_len, D_v]` in q's dtype
    (over latents `[B, H, q_len, r]`). A query that may see no token gets zeros.
    """
    q, config, view = call.q, call.config, call.view
    batch, q_heads, queries, dim = q.shape
    heads, held, new = call.kv_heads, call.held, call.new
    groups = query_groups(q_heads, heads, config)
    check_call(call)
    rules = LogitRules(config, call.padding, held + new - queries, queries, heads, groups)
    scale = config.softmax_scale if config.softmax_scale is not None else dim**-0.5
    rows = torch.unflatten(q.float() * scale, 1, (heads, groups)).flatten(2, 3)
    tokens = (LatentTokens if call.latent else SeparateTokens)(view, rows, call.output_dim)
    softmax = OnlineSoftmax(
        (batch, heads, groups * queries),
        call.output_dim,
        q.device,
        sink_rows(config, heads, groups, queries),
    )
    for start, end in view.chunks() if view is not None else ():
        logits, values, packed = tokens.held(start, end)
        softmax.add(rules.apply(logits, start), values, transformed=packed)
    if call.k is not None and call.v is not None:
        for start in range(0, new, CHUNK):
            part = slice(start, start + CHUNK)
            logits, values = tokens.new(call.k[:, :, part], call.v[:, :, part])
            softmax.add(rules.apply(logits, held + start), values, transformed=False)
    exact, transformed = softmax.result()
    if view is not None:
        codec = view.k.codec if call.latent else view.v.codec
        exact = exact + codec.transform.inverse(transformed)
    return saturated(torch.unflatten(exact, 2, (groups, queries)).flatten(1, 2), q.dtype)


def attend_exact(k: Tensor, v: Tensor, q: Tensor, config: AttendConfig) -> Tensor:
    """Attend over tokens that are all given: `[B, H_q, q_len, D_v]`, parameters as of a call."""
    return attend(AttendCall(None, k, v, q, config))
