"""Attention written out in fp64, without blocks: the reference for every faster way."""

import torch
from torch import Tensor

from kvpact.contract import AttendConfig, attend_config


def reference_attention(
    q: Tensor, k: Tensor, v: Tensor, config: AttendConfig | None = None, bias: Tensor | None = None
) -> Tensor:
    """Attend with the last `q_len` of `total` tokens as queries.

    Parameters
    ----------
    q : Tensor
        `[B, H_q, q_len, D]`.
    k, v : Tensor
        `[B, H_kv, total, D]` and `[B, H_kv, total, D_v]`.
    config : AttendConfig, optional
        All fields are followed but `exact_new`, which says what k and v have to be.
    bias : Tensor, optional
        `[B, H_q, q_len, total]`, added to the scaled logits.

    Returns
    -------
    Tensor
        `[B, H_q, q_len, D_v]` fp64; zeros for a query that may see no token.
    """
    config = attend_config(config)
    groups, total, new = q.shape[1] // k.shape[1], k.shape[2], q.shape[2]
    scale = config.softmax_scale if config.softmax_scale is not None else q.shape[-1] ** -0.5
    keys = k.double().repeat_interleave(groups, dim=1)
    logits = q.double() @ keys.mT * scale
    if bias is not None:
        logits = logits + bias.double()
    if config.softcap is not None:
        logits = torch.tanh(logits / config.softcap) * config.softcap
    if config.mask is not None and config.mask.dtype != torch.bool:
        logits = logits + config.mask.double()
    logits = logits.masked_fill(~_visible(config, q.shape[0], new, total), -torch.inf)
    if config.sink_logits is not None:
        sink = config.sink_logits.double().view(1, -1, 1, 1).expand(*logits.shape[:3], 1)
        logits = torch.cat([logits, sink], dim=-1)
    weights = torch.softmax(logits, dim=-1).nan_to_num(0.0)[..., :total]
    return weights @ v.double().repeat_interleave(groups, dim=1)


def _visible(config: AttendConfig, batch: int, new: int, total: int) -> Tensor:
    """`[B, 1 or H_q, q_len, total]`: which token a query may see."""
    tokens = torch.arange(total, dtype=torch.int64, device="cpu")
    queries = tokens[total - new :].unsqueeze(-1)
    visible = torch.ones(batch, 1, new, total, dtype=torch.bool, device="cpu")
    if config.is_causal:
        visible = visible & (tokens <= queries)
    if config.sliding_window is not None:
        visible = visible & (tokens > queries - config.sliding_window)
    if config.padding is not None:
        visible = visible & (tokens >= config.padding.view(-1, 1, 1, 1))
    if config.mask is not None:
        mask = config.mask
        boolean = mask.dtype == torch.bool
        visible = visible & (mask if boolean else mask > torch.finfo(mask.dtype).min / 2)
    return visible
