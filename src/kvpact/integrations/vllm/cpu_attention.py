"""vLLM's own CPU attention: its use along with kvpact, and the order of its pages.

Where it multiplies in AMX it is the kernel of prompts. Its other kernels are no faster than
kvpact's, and would need what is stored to be decoded first.
"""

from dataclasses import replace
from functools import cache
from typing import Any, ClassVar

import torch
from torch import Tensor
from vllm import _custom_ops as ops
from vllm import envs
from vllm.v1.attention.backends.cpu_attn import (
    CPUAttentionBackend,
    CPUAttentionBackendImpl,
    _get_attn_isa,
)

from kvpact.contract import AttendConfig
from kvpact.errors import BackendUnavailable
from kvpact.formats import TILE
from kvpact.integrations.pages.prompt import PAGE, Pages, Sequences
from kvpact.integrations.vllm.setting import sliding_block

_AMX = "amx"
_DIGIT = 256  # whole numbers below this are exact in every dtype of pages


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
        """Return the schedule that calls of all layers over the same sequences share."""
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


class SlidingBackend(CPUAttentionBackend):
    """vLLM's own CPU attention; `full`: bytes of a token in the largest of the other layers."""

    full: ClassVar[int]

    @classmethod
    def customize_spec(cls, spec: Any) -> Any:
        """Return a layer's page format, with fewer tokens in a page than kvpact's have."""
        if spec.block_size < TILE:
            return spec
        own = spec.page_size_bytes // spec.block_size
        return replace(spec, block_size=sliding_block(spec.block_size, own, cls.full))


@cache
def sliding_backend(full: int) -> type[SlidingBackend]:
    """Return the class of layers next to others whose tokens have at most `full` bytes."""
    return type(f"SlidingBackend{full}", (SlidingBackend,), {"full": full})


def orders_of(layer: Any, tokens: int, dim: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return the orders of a layer's pages, as `page_orders` does."""
    if not isinstance(layer.impl, CPUAttentionBackendImpl):
        raise BackendUnavailable(
            "kvpact's connector encodes the pages of vLLM's CPU attention alone, not of "
            f"{type(layer.impl).__name__}"
        )
    return page_orders(layer.isa, tokens, dim, dtype)


def page_orders(
    isa: str | None, tokens: int, dim: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Return where number ``token * dim + channel`` of K, and of V, lies in its half of a page."""
    # vLLM's kernel writes known numbers: its order differs by instruction set, and may by version.
    isa = isa or _get_attn_isa(dtype, tokens, dim)
    numbers = torch.arange(tokens * dim, dtype=torch.int64, device="cpu")
    seen, scale = torch.zeros(2, tokens * dim, dtype=torch.int64, device="cpu"), 1
    while scale < len(numbers):
        digit = (numbers // scale % _DIGIT).view(tokens, 1, dim).to(dtype)
        page = torch.zeros(1, 1, 2 * tokens, dim, dtype=dtype, device="cpu")
        k, v = page.chunk(2, dim=2)
        ops.cpu_attn_reshape_and_cache(digit, digit, k, v, numbers[:tokens], isa)
        seen += scale * page.view(2, -1).to(torch.int64)
        scale *= _DIGIT
    order = seen.argsort(dim=1)
    if not torch.equal(seen.gather(1, order), numbers.expand(2, -1)):
        raise BackendUnavailable(
            f"vLLM's pages of {dtype} ({isa}) are no permutation of their tokens"
        )
    return order[0], order[1]
