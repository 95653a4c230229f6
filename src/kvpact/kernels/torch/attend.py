"""Attention over packed slots and exact tokens, tile by tile: the definition of the result.

The query is transformed once, the output back once; what is cached stays transformed. Packed
tokens, exact tokens and the new ones meet in one online softmax, so neither the scores nor a
decompressed K or V ever exist for all tokens at once.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvpact.arithmetic import saturated
from kvpact.kernels.base import AttendCall
from kvpact.kernels.torch.latent import (
    Decode,
    KeyMaking,
    LatentTokens,
    MadeTokens,
    SeparateTokens,
)
from kvpact.kernels.torch.logits import LogitRules, check_call, query_groups, sink_rows
from kvpact.kernels.views import CHUNK


class OnlineSoftmax:
    """Accumulates `softmax(logits) @ values` over tiles, of values as they are or transformed.

    `rows`: `[B, H_kv, R]`, the leading shape; `sink_logits`: one more logit per row, without a
    value.
    """

    def __init__(
        self, rows: tuple[int, ...], dim: int, device: torch.device, sink_logits: Tensor | None
    ) -> None:
        self.peak = torch.full((*rows, 1), -torch.inf, dtype=torch.float32, device=device)
        self.total = torch.zeros(*rows, 1, dtype=torch.float32, device=device)
        if sink_logits is not None:
            self.peak = sink_logits.to(device, torch.float32).expand(rows).unsqueeze(-1).clone()
            self.total = torch.ones_like(self.total)
        self._exact = torch.zeros(*rows, dim, dtype=torch.float32, device=device)
        self._transformed = torch.zeros(*rows, dim, dtype=torch.float32, device=device)

    def add(self, logits: Tensor, values: Tensor, transformed: bool) -> None:
        """Take in logits `[B, H_kv, R, t]` (overwritten; -inf: hidden) and their values."""
        peak = torch.maximum(self.peak, logits.amax(-1, keepdim=True))
        # A row that has seen no token yet keeps a peak of -inf; 0 stands in for it, so that
        # exp(-inf - 0) is 0 and not NaN.
        safe = torch.where(peak == -torch.inf, torch.zeros_like(peak), peak)
        decay = torch.exp(self.peak - safe)
        weights = logits.sub_(safe).exp_()
        self.total = self.total * decay + weights.sum(-1, keepdim=True)
        self._exact *= decay
        self._transformed *= decay
        accumulator = self._transformed if transformed else self._exact
        accumulator += weights @ values.to(torch.float32)
        self.peak = peak

    def result(self) -> tuple[Tensor, Tensor]:
        """Return the two parts, exact and transformed; zero for rows that saw no token."""
        total = torch.where(self.total == 0, torch.ones_like(self.total), self.total)
        return self._exact / total, self._transformed / total


def attend(call: AttendCall, made: tuple[Decode, KeyMaking] | None = None) -> Tensor:
    """Attend over what a layer holds and over new tokens: `[B, H_q, q_len, D_v]` in q's dtype.

    `made`: how values are decoded and keys made of them, where no keys are held (see `MadeTokens`).
    """
    q, config, view = call.q, call.config, call.view
    batch, q_heads, queries, _ = q.shape
    heads, held, new = call.kv_heads, call.held, call.new
    groups = query_groups(q_heads, heads, config)
    check_call(call)
    rules = LogitRules(config, call.padding, held + new - queries, queries, heads, groups)
    rows = torch.unflatten(q.float() * call.scale, 1, (heads, groups)).flatten(2, 3)
    tokens: LatentTokens | SeparateTokens | MadeTokens
    if made is not None:
        tokens = MadeTokens(view, rows, *made)
    else:
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
