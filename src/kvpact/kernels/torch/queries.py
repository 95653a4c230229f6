"""How query heads share KV heads, and the extra logits that come with them."""

from __future__ import annotations

from torch import Tensor

from kvpact.contract import AttendConfig
from kvpact.errors import GeometryError
from kvpact.kernels.base import AttendCall
from kvpact.kernels.torch.logits import LogitRules


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
