"""Attention over a view of packed slots and new exact tokens, tile by tile.

The query is transformed once, the output back once; what is cached stays transformed. Packed
tokens, exact tokens and the new ones meet in one online softmax, so neither the scores nor a
decompressed K or V ever exist for all tokens at once.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvpact.attention.logits import LogitRules
from kvpact.attention.online import OnlineSoftmax
from kvpact.attention.views import CHUNK, LayerView
from kvpact.contract import AttendConfig
from kvpact.errors import GeometryError


def attend(
    view: LayerView | None,
    k: Tensor | None,
    v: Tensor | None,
    q: Tensor,
    config: AttendConfig,
    padding: Tensor | None = None,
) -> Tensor:
    """Attend over what a layer holds and over new tokens.

    Parameters
    ----------
    view : LayerView or None
        The tokens held; None for an empty layer.
    k, v : Tensor or None
        `[B, H_kv, new, D]` and `[B, H_kv, new, D_v]`, attended as given; they follow the view's
        tokens. None where the new tokens are in the view already.
    q : Tensor
        `[B, H_q, q_len, D]`, the queries of the last `q_len` tokens.
    config : AttendConfig
        How to attend.
    padding : Tensor, optional
        `[B]` left-padding tokens of each row.

    Returns
    -------
    Tensor
        `[B, H_q, q_len, D_v]` in q's dtype. A query that may see no token gets zeros.
    """
    batch, q_heads, queries, dim = q.shape
    shapes = k if k is not None else (view.k.tail if view is not None else None)
    values = v if v is not None else (view.v.tail if view is not None else None)
    assert shapes is not None and values is not None
    heads, held = shapes.shape[1], view.length if view is not None else 0
    groups = query_groups(q_heads, heads, config)
    new = k.shape[2] if k is not None else 0
    rules = LogitRules(config, padding, held + new - queries, queries, heads, groups)
    rules.check_mask(batch, held + new)
    scale = config.softmax_scale if config.softmax_scale is not None else dim**-0.5
    rows = torch.unflatten(q.float() * scale, 1, (heads, groups)).flatten(2, 3)
    softmax = OnlineSoftmax(
        (batch, heads, groups * queries),
        values.shape[-1],
        q.device,
        _sink_rows(config, heads, groups, queries),
    )
    if view is not None:
        _attend_view(view, rows, rules, softmax)
    if k is not None and v is not None:
        for start in range(0, new, CHUNK):
            part = slice(start, start + CHUNK)
            logits = rules.apply(rows @ k[:, :, part].float().mT, held + start)
            softmax.add(logits, v[:, :, part], transformed=False)
    exact, transformed = softmax.result()
    if view is not None:
        exact = exact + view.v.codec.transform.inverse(transformed)
    return torch.unflatten(exact, 2, (groups, queries)).flatten(1, 2).to(q.dtype)


def check_queries(q: Tensor, kv_heads: int, total: int, config: AttendConfig) -> None:
    """Raise what `attend` would raise for such queries over `total` tokens.

    Raises
    ------
    GeometryError
        The heads don't divide, or the mask does not fit.
    """
    groups = query_groups(q.shape[1], kv_heads, config)
    rules = LogitRules(config, None, total - q.shape[2], q.shape[2], kv_heads, groups)
    rules.check_mask(q.shape[0], total)
    _sink_rows(config, kv_heads, groups, q.shape[2])


def _attend_view(view: LayerView, rows: Tensor, rules: LogitRules, softmax: OnlineSoftmax) -> None:
    rotated = view.k.codec.transform.forward(rows) if view.k.exact_from else rows
    for start, end in view.chunks():
        if start >= view.k.exact_from:
            logits = rows @ view.k.read_exact(start, end).float().mT
        else:
            logits = rotated @ view.k.read(start, end).mT
        packed = start < view.v.exact_from
        values = view.v.read(start, end) if packed else view.v.read_exact(start, end)
        softmax.add(rules.apply(logits, start), values, transformed=packed)


def query_groups(q_heads: int, kv_heads: int, config: AttendConfig) -> int:
    """Return query heads per KV head.

    Raises
    ------
    GeometryError
        The heads don't divide, or differ from `config.n_kv_groups`.
    """
    groups, rest = divmod(q_heads, kv_heads)
    if rest or groups == 0:
        raise GeometryError(f"{q_heads} query heads can't share {kv_heads} KV heads evenly")
    if config.n_kv_groups not in (None, groups):
        raise GeometryError(
            f"config.n_kv_groups is {config.n_kv_groups}, but {q_heads} query heads over "
            f"{kv_heads} KV heads make {groups}"
        )
    return groups


def _sink_rows(config: AttendConfig, heads: int, groups: int, queries: int) -> Tensor | None:
    if config.sink_logits is None:
        return None
    if config.sink_logits.shape != (heads * groups,):
        shape = tuple(config.sink_logits.shape)
        raise GeometryError(f"sink_logits has shape {shape}; it should be [{heads * groups}]")
    per_head = config.sink_logits.float().view(1, heads, groups, 1)
    return per_head.expand(-1, -1, -1, queries).flatten(2, 3)
