"""vLLM's own CPU attention as the kernel of prompts, where it multiplies in AMX.

Its other kernels are no faster than kvpact's, and would need what is stored to be decoded first.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from vllm import _custom_ops as ops
from vllm import envs
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend, _get_attn_isa

from kvpact.contract import AttendConfig
from kvpact.integrations.vllm.prompt import PAGE, Pages, Sequences

_AMX = "amx"


def why_not(k_dim: int, v_dim: int, dtype: torch.dtype) -> str:
    """Return why vLLM's kernel does not take prompts of such heads here; empty if it does."""
    if k_dim != v_dim:
        return f"keys of width {k_dim} and values of width {v_dim}"
    if k_dim not in CPUAttentionBackend.get_supported_head_sizes():
        return f"heads of width {k_dim}"
    isa = _get_attn_isa(dtype, PAGE, k_dim)
    return "" if isa == _AMX else f"{dtype} here: vLLM's kernel for it ({isa}) is no faster"


class OwnKernel:
    """Attends over scratch pages of exact tokens, causally; of heads that `why_not` lets pass."""

    def __init__(self, q_heads: int, kv_heads: int, dim: int, dtype: torch.dtype) -> None:
        self._heads, self._dim, self._dtype = (q_heads, kv_heads), dim, dtype
        torch.cpu._init_amx()  # asks the system for this process' leave to use it

    def put(self, k: Tensor, v: Tensor, pages: Pages, slots: Tensor) -> None:
        """Write tokens, `[T, H, D]`, to the places `slots`: ``page * PAGE`` and a number in it."""
        ops.cpu_attn_reshape_and_cache(k, v, *pages, slots, _AMX)

    def schedule(self, sequences: Sequences) -> Tensor:
        """Return what calls of all layers over the same sequences have in common."""
        q_heads, kv_heads = self._heads
        made: Tensor = ops.cpu_attn_get_scheduler_metadata(
            num_reqs=len(sequences.lengths),
            num_heads=q_heads,
            num_kv_heads=kv_heads,
            head_dim=self._dim,
            seq_lens=sequences.lengths,
            dtype=self._dtype,
            query_start_loc=sequences.starts,
            causal=True,
            sliding_window_size=-1,
            isa=_AMX,
            enable_kv_split=envs.VLLM_CPU_ATTN_SPLIT_KV,
        )
        return made

    def attend(
        self,
        q: Tensor,
        pages: Pages,
        sequences: Sequences,
        schedule: Any,
        config: AttendConfig,
        out: Tensor,
    ) -> None:
        """Attend with `[new tokens, H_q, D]`, each to itself and to those before it."""
        k_pages, v_pages = pages
        ops.cpu_attention_with_kv_cache(
            query=q,
            key_cache=k_pages,
            value_cache=v_pages,
            output=out,
            query_start_loc=sequences.starts,
            seq_lens=sequences.lengths,
            scale=config.softmax_scale if config.softmax_scale is not None else self._dim**-0.5,
            causal=True,
            alibi_slopes=None,
            sliding_window=-1,
            block_table=sequences.tables,
            softcap=config.softcap or 0.0,
            scheduler_metadata=schedule,
            s_aux=None,
        )
