"""In which order vLLM's CPU attention keeps the numbers of a page: its own kernel shows it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from vllm import _custom_ops as ops
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl, _get_attn_isa

from kvpact.errors import BackendUnavailable

_DIGIT = 256
"""Whole numbers below this are exact in every dtype of pages."""


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
    """Return where the number ``token * dim + channel`` of K, and of V, lies in its half of a page.

    vLLM's kernel writes known numbers: its order differs by instruction set, and may by version.
    """
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
