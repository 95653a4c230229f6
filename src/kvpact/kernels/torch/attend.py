"""Attention over a view of packed slots and new exact tokens, tile by tile.

The query is transformed once, the output back once; what is cached stays transformed. Packed
tokens, exact tokens and the new ones meet in one online softmax, so neither the scores nor a
decompressed K or V ever exist for all tokens at once.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvpact.arithmetic import saturated
from kvpact.contract import AttendConfig
from kvpact.kernels.cpu.attend import attend_native, refusal, tokens_of
from kvpact.kernels.plan import Kernel
from kvpact.kernels.queries import query_groups, sink_rows
from kvpact.kernels.torch.logits import LogitRules
from kvpact.kernels.torch.online import OnlineSoftmax
from kvpact.kernels.views import CHUNK, LayerView


def attend(
    view: LayerView | None,
    k: Tensor | None,
    v: Tensor | None,
    q: Tensor,
    config: AttendConfig,
    padding: Tensor | None = None,
    kernel: Kernel | None = None,
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
    kernel : Kernel, optional
        What computes over new tokens without a past; where there is a view, the view's does.

    Returns
    -------
    Tensor
        `[B, H_q, q_len, D_v]` in q's dtype. A query that may see no token gets zeros.
    """
    kernel = kernel if view is None else view.kernel
    if kernel is not None:
        output = by_kernel(kernel, view, k, v, q, config, padding)
        if output is not None:
            return output
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
        sink_rows(config, heads, groups, queries),
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
    return saturated(torch.unflatten(exact, 2, (groups, queries)).flatten(1, 2), q.dtype)


def by_kernel(
    kernel: Kernel,
    view: LayerView | None,
    k: Tensor | None,
    v: Tensor | None,
    q: Tensor,
    config: AttendConfig,
    padding: Tensor | None,
    latent: bool = False,
) -> Tensor | None:
    """Attend natively, or return None and note why the torch body has to do it.

    Parameters
    ----------
    kernel : Kernel
        What computes.
    view, k, v, q, config, padding
        As in `attend`.
    latent : bool
        The call is one of `attend_latent`.
    """
    if kernel.library is None:
        kernel.calls["torch"] += 1
        return None
    reason = refusal(view, k, v, q, config)
    if not reason:
        check_call(view, k, q, config)
        output = attend_native(kernel, view, k, v, q, config, padding, latent)
        kernel.calls["cpu"] += 1
        return output
    kernel.calls[f"torch: {reason}"] += 1
    return None


def check_call(view: LayerView | None, k: Tensor | None, q: Tensor, config: AttendConfig) -> None:
    """Raise what the torch body would raise for the heads, the mask and the sinks of a call."""
    heads = tokens_of(view and view.k, k).shape[1]
    if config.mask is not None or config.sink_logits is not None:
        held = 0 if view is None else view.length
        check_queries(q, heads, held + count_of(k), config)
    else:
        query_groups(q.shape[1], heads, config)


def count_of(tokens: Tensor | None) -> int:
    """Return how many tokens `[B, H, T, D]` holds."""
    return 0 if tokens is None else tokens.shape[2]


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
    sink_rows(config, kv_heads, groups, q.shape[2])


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
