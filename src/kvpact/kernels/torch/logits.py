"""Query heads over KV heads; and what happens to logits before the softmax: cap, masks, windows."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvpact.contract import AttendConfig
from kvpact.errors import DtypeError, GeometryError
from kvpact.kernels.base import AttendCall


@dataclass(frozen=True)
class LogitRules:
    """Rules of a call; `padding`: `[B]`; `queries` per head, KV `heads`, query `groups`."""

    config: AttendConfig
    padding: Tensor | None
    first: int
    queries: int
    heads: int
    groups: int

    def check_mask(self, batch: int, total: int) -> None:
        """Raise `GeometryError` (or `DtypeError`) unless the mask fits."""
        mask = self.config.mask
        if mask is None:
            return
        if mask.dtype != torch.bool and not mask.dtype.is_floating_point:
            raise DtypeError(f"mask is {mask.dtype}; boolean and floating-point masks are known")
        wanted = (batch, self.heads * self.groups, self.queries, total)
        fits = mask.dim() == 4 and all(
            m == w or (i < 3 and m == 1)
            for i, (m, w) in enumerate(zip(mask.shape, wanted, strict=True))
        )
        if not fits:
            raise GeometryError(
                f"mask has shape {tuple(mask.shape)}; it should broadcast to {wanted} "
                "(batch, query heads, queries, tokens held and new)"
            )

    def apply(self, logits: Tensor, start: int) -> Tensor:
        """Apply all rules to scaled logits `[B, H_kv, G * q_len, t]` of tokens from `start` on."""
        cap = self.config.softcap
        if cap is not None:
            logits = logits.div_(cap).tanh_().mul_(cap)
        count = logits.shape[-1]
        x = torch.unflatten(logits, 2, (self.groups, self.queries))
        x = self._apply_mask(x, start, count)
        hidden = self._hidden(start, count, logits.device)
        if hidden is not None:
            x = x.masked_fill_(hidden, -torch.inf)
        return x.flatten(2, 3)

    def _apply_mask(self, x: Tensor, start: int, count: int) -> Tensor:
        mask = self.config.mask
        if mask is None:
            return x
        mask = mask[..., start : start + count].to(x.device)
        if mask.shape[1] != 1:
            mask = torch.unflatten(mask, 1, (self.heads, self.groups))
        else:
            mask = mask.unsqueeze(2)
        if mask.dtype == torch.bool:
            return x.masked_fill_(~mask, -torch.inf)
        # An additive mask marks hidden tokens with the lowest number of its dtype; as a sum that
        # would still let a row of hidden tokens attend to all of them.
        lowest = torch.finfo(mask.dtype).min
        return x.add_(mask).masked_fill_(mask <= lowest / 2, -torch.inf)

    def _hidden(self, start: int, count: int, device: torch.device) -> Tensor | None:
        """`[B or 1, 1, 1, q_len or 1, t]`, True where a query may not see a token; or None."""
        tokens = torch.arange(start, start + count, dtype=torch.int64, device=device)
        queries = self.first + torch.arange(self.queries, dtype=torch.int64, device=device)
        queries = queries.unsqueeze(-1)
        hidden: Tensor | None = None
        if self.config.is_causal and start + count - 1 > self.first:
            hidden = (tokens > queries).expand(1, 1, 1, -1, -1)
        window = self.config.sliding_window
        if window is not None and start <= self.first + self.queries - 1 - window:
            outside = (tokens <= queries - window).expand(1, 1, 1, -1, -1)
            hidden = outside if hidden is None else hidden | outside
        if self.padding is not None:
            pad = tokens < self.padding.to(device).view(-1, 1, 1, 1, 1)
            hidden = pad if hidden is None else hidden | pad
        return hidden


def query_groups(q_heads: int, kv_heads: int, config: AttendConfig) -> int:
    """Return query heads per KV head. Raises `GeometryError`."""
    groups, rest = divmod(q_heads, kv_heads)
    if rest or groups == 0:
        raise GeometryError(f"{q_heads} query heads can't share {kv_heads} KV heads evenly")
    if config.n_kv_groups not in (None, groups):
        raise GeometryError(
            f"config.n_kv_groups is {config.n_kv_groups}, but {q_heads} query heads over "
            f"{kv_heads} KV heads make {groups}"
        )
    return groups


def sink_rows(config: AttendConfig, heads: int, groups: int, queries: int) -> Tensor | None:
    """Return `config.sink_logits` for every row of queries, `[1, H_kv, G * q_len]`; or None."""
    if config.sink_logits is None:
        return None
    if config.sink_logits.shape != (heads * groups,):
        shape = tuple(config.sink_logits.shape)
        raise GeometryError(f"sink_logits has shape {shape}; it should be [{heads * groups}]")
    per_head = config.sink_logits.float().view(1, heads, groups, 1)
    return per_head.expand(-1, -1, -1, queries).flatten(2, 3)


def mask_numbers(mask: Tensor) -> Tensor:
    """Return a mask as bytes, or as fp32 with -inf for what its dtype's lowest number hides."""
    if mask.dtype == torch.bool:
        return mask.view(torch.uint8)
    hidden = mask <= torch.finfo(mask.dtype).min / 2
    return mask.to(torch.float32).masked_fill(hidden, -torch.inf)


def check_queries(q: Tensor, kv_heads: int, total: int, config: AttendConfig) -> None:
    """Raise what attention would raise for queries over `total` tokens."""
    groups = query_groups(q.shape[1], kv_heads, config)
    if config.mask is None and config.sink_logits is None:
        return
    rules = LogitRules(config, None, total - q.shape[2], q.shape[2], kv_heads, groups)
    rules.check_mask(q.shape[0], total)
    sink_rows(config, kv_heads, groups, q.shape[2])


def check_latent_config(config: AttendConfig) -> None:
    """Raise `GeometryError` without a scale: the width of the heads can't be seen in latents."""
    if config.softmax_scale is None:
        raise GeometryError(
            "attention over latents needs config.softmax_scale: (d_nope + d_rope) ** -0.5 of the "
            "model's heads, times what the model adds to it"
        )


def check_call(call: AttendCall) -> None:
    """Raise a named error for what no backend could compute."""
    if call.latent:
        check_latent_config(call.config)
    check_queries(call.q, call.kv_heads, call.held + call.new, call.config)
