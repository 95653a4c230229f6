"""What vLLM's log says of kvpact's pages when it starts."""

from __future__ import annotations

from typing import Any

import torch
from vllm.logger import init_logger
from vllm.v1.kv_cache_interface import AttentionSpec

from kvpact.integrations.vllm.setting import codecs, native_plan
from kvpact.integrations.vllm.window import SLACK
from kvpact.kernels.plan import Plan
from kvpact.spec import Spec

# vLLM configures loggers below "vllm" alone.
logger = init_logger(f"vllm.{__name__}")


def log_start(spec: AttentionSpec, names: list[str], config: Any, device: torch.device) -> None:
    """Log what the layers that store by one spec have."""
    dtype = config.model_config.dtype
    layers = config.compilation_config.static_forward_context
    backend = layers[names[0]].attn_backend
    stored: Spec = backend.stored
    widths: tuple[int, int] = backend.widths(spec)
    pair = codecs(stored, *widths, dtype)
    plan: Plan = native_plan(*pair, dtype, device, backend.latent)
    plain = sum(widths) * dtype.itemsize
    content = spec.state_content_size_bytes
    # Layers with a sliding window know the bytes of a token beside them (`SlidingBackend.full`).
    backends = [layer.attn_backend for layer in layers.values() if hasattr(layer, "attn_backend")]
    beside = [other.full for other in backends if hasattr(other, "full")]
    sliding = len(beside)
    logger.info(
        "kvpact stores %s of %d layers as %s: %d bytes per token and KV head instead of %d "
        "(%s), %.2f times as many tokens: %s. %r",
        "latents and rotated keys" if backend.latent else "K and V",
        len(names),
        stored,
        content,
        plain,
        dtype,
        plain / content,
        _pages(spec, sliding, config),
        plan,
    )
    if sliding:
        logger.info(
            "kvpact leaves %d layers with a sliding window to vLLM's own attention, in %s",
            sliding,
            dtype,
        )
    if padded := spec.page_size_padded:
        page = spec.unpadded_page_size_bytes
        larger = spec.block_size * max(beside, default=0)
        logger.warning(
            "vLLM makes the pages of all layers equally large, so %.0f %% of kvpact's are empty: "
            "%d of %d bytes are used; %s",
            100 * (1 - page / padded),
            page,
            padded,
            "specs of equal size for all layers, or --disable-hybrid-kv-cache-manager, avoid it"
            if padded <= larger
            else f"a --block-size larger than {spec.block_size} leaves less",
        )
    if width := stored.key.window:
        each = len(names) * spec.num_kv_heads * plain * (width + SLACK)
        sequences = config.scheduler_config.max_num_seqs
        logger.info(
            "kvpact keeps the last %d tokens of each sequence exactly, beside the pages: %.2f MB "
            "for each, at most %.0f MB for --max-num-seqs %d",
            width,
            each / 1e6,
            sequences * each / 1e6,
            sequences,
        )


def _pages(spec: AttentionSpec, sliding: int, config: Any) -> str:
    count: int = config.cache_config.num_gpu_blocks
    if sliding:
        return f"{count:,} pages, of {spec.block_size} tokens here"
    return f"pages for {count * spec.block_size:,} tokens"
