"""Layers with a sliding window beside kvpact's pages: vLLM's own CPU attention."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any, ClassVar

from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

from kvpact.formats import TILE
from kvpact.integrations.vllm.by_layer import sliding_block


class SlidingBackend(CPUAttentionBackend):
    """vLLM's own CPU attention; `full`: bytes of a token in the largest layer beside its own."""

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
    """Return the class of layers beside such whose tokens have at most `full` bytes."""
    return type(f"SlidingBackend{full}", (SlidingBackend,), {"full": full})
