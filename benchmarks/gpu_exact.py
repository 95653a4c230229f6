"""Attention over exact K and V by whatever kernels are installed, for a decode step."""

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

Works = dict[str, Callable[[], Any]]


def exact_kernels(q: Tensor, k: Tensor, v: Tensor) -> Works:
    """Return kernels over `[B, H, T, D]` bf16 for one query a row: torch's and installed ones."""
    batch, heads, _, dim = k.shape
    groups = q.shape[1] // heads
    attend = torch.nn.functional.scaled_dot_product_attention
    rows = q.view(batch, heads, groups, dim)
    works: Works = {
        # A group's queries are the rows of one head: flash attention reads K and V once.
        "torch sdpa, flash": lambda: attend(rows, k, v),
        "torch matmul": lambda: torch.softmax(rows @ k.mT * dim**-0.5, -1) @ v,
    }
    if find_spec("flash_attn"):
        works["flash-attn"] = _flash(q, k, v)
    if find_spec("flashinfer"):
        works["FlashInfer"] = _flashinfer(q, k, v)
    if find_spec("vllm"):
        works["vLLM flash"] = _vllm(q, k, v)
    return works


def _flash(q: Tensor, k: Tensor, v: Tensor) -> Callable[[], Any]:
    from flash_attn import flash_attn_with_kvcache

    q, k, v = (x.transpose(1, 2).contiguous() for x in (q, k, v))
    return lambda: flash_attn_with_kvcache(q, k, v)


def _pages(x: Tensor, size: int) -> Tensor:
    batch, heads, tokens, dim = x.shape
    return x.transpose(1, 2).reshape(batch * tokens // size, size, heads, dim).contiguous()


def _flashinfer(q: Tensor, k: Tensor, v: Tensor, size: int = 64) -> Callable[[], Any]:
    import flashinfer

    batch, heads, tokens, dim = k.shape
    pages, count = (_pages(k, size), _pages(v, size)), tokens // size
    room = torch.empty(2**28, dtype=torch.uint8, device="cuda")
    decode = flashinfer.BatchDecodeWithPagedKVCacheWrapper(room, "NHD", use_tensor_cores=True)
    ends = torch.arange(0, batch * count + 1, count, dtype=torch.int32, device="cuda")
    table = torch.arange(batch * count, dtype=torch.int32, device="cuda")
    last = torch.full((batch,), size, dtype=torch.int32, device="cuda")
    shape = (q.shape[1], heads, dim, size)
    decode.plan(ends, table, last, *shape, q_data_type=q.dtype)
    rows = q.squeeze(2).contiguous()
    return lambda: decode.run(rows, pages)


def _vllm(q: Tensor, k: Tensor, v: Tensor, size: int = 16) -> Callable[[], Any]:
    from vllm.vllm_flash_attn import flash_attn_varlen_func

    batch, _, tokens, _ = k.shape
    table = torch.arange(batch * tokens // size, dtype=torch.int32, device="cuda").view(batch, -1)
    rows, keys, values = q.squeeze(2).contiguous(), _pages(k, size), _pages(v, size)
    starts = torch.arange(batch + 1, dtype=torch.int32, device="cuda")
    used = torch.full((batch,), tokens, dtype=torch.int32, device="cuda")
    return lambda: flash_attn_varlen_func(
        q=rows, k=keys, v=values, max_seqlen_q=1, cu_seqlens_q=starts, max_seqlen_k=tokens,
        seqused_k=used, block_table=table, causal=True,
    )  # fmt: skip
