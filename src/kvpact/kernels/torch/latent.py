"""Attention over MLA latents, absorbed: K and V of the heads never exist.

DeepSeek-V2 (arXiv:2405.04434, section 2.1.2) caches one latent `c` of width r and one rotated key
`k_r` of width d_r per token, shared by all heads. The keys and values of head h are

    k_h = [W_UK_h c, k_r],    v_h = W_UV_h c,

so the logits are `q_nope · W_UK_h c + q_rope · k_r = [W_UK_h^T q_nope, q_rope] · [c, k_r]`, and the
output is `W_UV_h` times the mean of the latents. With W_UK taken into the query and W_UV into the
output, all heads attend over one shared key `[c, k_r]` and one shared value `c`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvpact.arithmetic import saturated
from kvpact.contract import AttendConfig
from kvpact.errors import GeometryError
from kvpact.kernels.plan import Kernel
from kvpact.kernels.queries import query_groups, sink_rows
from kvpact.kernels.torch.attend import by_kernel
from kvpact.kernels.torch.logits import LogitRules
from kvpact.kernels.torch.online import OnlineSoftmax
from kvpact.kernels.views import CHUNK, LayerView, StreamView


def absorb_query(q_nope: Tensor, q_rope: Tensor, w_uk: Tensor) -> Tensor:
    """Return the query over latents, `[W_UK^T q_nope, q_rope]`.

    Parameters
    ----------
    q_nope : Tensor
        `[B, H, S, d_nope]`, the part of the query that is not rotated.
    q_rope : Tensor
        `[B, H, S, d_rope]`, the rotated part.
    w_uk : Tensor
        `[H, d_nope, r]`, from the latent to each head's keys.

    Returns
    -------
    Tensor
        `[B, H, S, r + d_rope]`.
    """
    return torch.cat([q_nope @ w_uk, q_rope], dim=-1)


def expand_output(output: Tensor, w_uv: Tensor) -> Tensor:
    """Return `W_UV` times the attention's output over latents.

    Parameters
    ----------
    output : Tensor
        `[B, H, S, r]`.
    w_uv : Tensor
        `[H, d_v, r]`, from the latent to each head's values.

    Returns
    -------
    Tensor
        `[B, H, S, d_v]`.
    """
    return output @ w_uv.mT


def check_latent_config(config: AttendConfig) -> None:
    """Raise `GeometryError` without a scale: the width of the heads can't be seen in latents."""
    if config.softmax_scale is None:
        raise GeometryError(
            "attention over latents needs config.softmax_scale: (d_nope + d_rope) ** -0.5 of the "
            "model's heads, times what the model adds to it"
        )


def attend_latent(
    view: LayerView | None,
    c_kv: Tensor | None,
    k_rope: Tensor | None,
    q: Tensor,
    config: AttendConfig,
    padding: Tensor | None = None,
    kernel: Kernel | None = None,
) -> Tensor:
    """Attend over the latents that a layer holds and over new ones.

    Parameters
    ----------
    view : LayerView or None
        The latents held (as K) and the rotated keys (as V); None for an empty layer.
    c_kv, k_rope : Tensor or None
        `[B, 1, new, r]` and `[B, 1, new, d_rope]`, attended as given; None where the new tokens
        are in the view already.
    q : Tensor
        `[B, H, q_len, r + d_rope]`, from `absorb_query`.
    config, padding, kernel
        As in `attend`; `config.softmax_scale` is needed.

    Returns
    -------
    Tensor
        `[B, H, q_len, r]` in q's dtype; `expand_output` makes the heads' outputs of it. A query
        that may see no token gets zeros.

    Raises
    ------
    GeometryError
        There is no scale, or heads or mask don't fit.
    """
    check_latent_config(config)
    batch, heads, queries, _ = q.shape
    latents = c_kv if c_kv is not None else (view.k.tail if view is not None else None)
    assert latents is not None and config.softmax_scale is not None
    rank, held = latents.shape[-1], view.length if view is not None else 0
    new = c_kv.shape[2] if c_kv is not None else 0
    query_groups(heads, 1, config)
    kernel = kernel if view is None else view.kernel
    if kernel is not None:
        output = by_kernel(kernel, view, c_kv, k_rope, q, config, padding, latent=True)
        if output is not None:
            return output
    rules = LogitRules(config, padding, held + new - queries, queries, 1, heads)
    rules.check_mask(batch, held + new)
    rows = (q.float() * config.softmax_scale).reshape(batch, 1, heads * queries, -1)
    q_c, q_r = rows[..., :rank], rows[..., rank:]
    sinks = sink_rows(config, 1, heads, queries)
    softmax = OnlineSoftmax((batch, 1, heads * queries), rank, q.device, sinks)
    if view is not None:
        _attend_view(view, q_c, q_r, rules, softmax)
    if c_kv is not None and k_rope is not None:
        for start in range(0, new, CHUNK):
            c, r = (x[:, :, start : start + CHUNK] for x in (c_kv, k_rope))
            logits = q_c @ c.float().mT + q_r @ r.float().mT
            softmax.add(rules.apply(logits, held + start), c, transformed=False)
    exact, transformed = softmax.result()
    if view is not None:
        exact = exact + view.k.codec.transform.inverse(transformed)
    return saturated(exact.reshape(batch, heads, queries, rank), q.dtype)


def _attend_view(
    view: LayerView, q_c: Tensor, q_r: Tensor, rules: LogitRules, softmax: OnlineSoftmax
) -> None:
    rotated_c, rotated_r = (
        stream.codec.transform.forward(rows) if stream.exact_from else rows
        for stream, rows in ((view.k, q_c), (view.v, q_r))
    )
    for start, end in view.chunks():
        c, packed = _tokens(view.k, start, end)
        r, packed_r = _tokens(view.v, start, end)
        logits = (rotated_c if packed else q_c) @ c.mT + (rotated_r if packed_r else q_r) @ r.mT
        softmax.add(rules.apply(logits, start), c, transformed=packed)


def _tokens(stream: StreamView, start: int, end: int) -> tuple[Tensor, bool]:
    """Return tokens in fp32, and whether they are packed (and therefore transformed)."""
    if start >= stream.exact_from:
        return stream.read_exact(start, end).float(), False
    return stream.read(start, end), True
