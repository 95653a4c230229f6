"""The name that kvpact's pages have for ``--kv-cache-dtype``, where vLLM takes others' names.

vLLM does from 0.33 on (`register_kv_cache_dtype`); before, `option` alone reads the name. A vLLM to
which nobody registered it does not start, instead of storing plain tokens.
"""

from __future__ import annotations

from typing import Any

import torch

DTYPE = "kvpact"
TAKEN = ("auto", DTYPE)
"""What a model that kvpact serves may be given."""


def register_dtype() -> None:
    """Make `DTYPE` known to vLLM, where it takes others' names."""
    try:
        from vllm.config.cache import register_kv_cache_dtype
    except ImportError:
        return
    from vllm.v1.kv_cache_interface import KVQuantMode

    class Handler:
        name = DTYPE

        def torch_dtype(self) -> torch.dtype:
            return torch.uint8

        def quant_mode(self) -> Any:
            # CUSTOM equals OCTAVE_K3V4 in 0.33. None of vLLM's kernels reads these pages, so they
            # need no mode.
            return KVQuantMode.NONE

    register_kv_cache_dtype(DTYPE)(Handler)


def as_model(layer: Any, dtype: torch.dtype) -> None:
    """Give a layer of this name the dtype of its K and V, as a layer that was given no name has."""
    if layer.kv_cache_dtype == DTYPE:
        layer.kv_cache_dtype, layer.kv_cache_torch_dtype = "auto", dtype
