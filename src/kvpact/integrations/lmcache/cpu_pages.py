"""The order of numbers in the pages of vLLM's CPU worker, asked of vLLM's own kernel."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from kvpact.errors import BackendUnavailable, GeometryError
from kvpact.integrations.lmcache.layout import CPUPages


def cpu_pages(tokens: int, dim: int) -> CPUPages:
    """Return the pages of vLLM's CPU worker on this machine."""
    if type(tokens) is not int or tokens < 1:
        raise GeometryError(f"cpu_block_size={tokens!r} should be vLLM's --block-size, as 128")
    try:
        from kvpact.integrations.vllm.connector_order import page_orders
    except ImportError as error:
        raise BackendUnavailable(
            f"cpu_block_size asks vLLM's own kernel for the order of its pages, and vLLM can't be "
            f"imported here ({error}): install it beside LMCache"
        ) from error

    @cache
    def orders(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        return page_orders(None, tokens, dim, dtype)

    return CPUPages(tokens, orders)
