"""The builder of vLLM's batches, the choice of a kernel for their prompts, and the log."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache, lru_cache
from typing import Any, ClassVar

import torch
from torch import Tensor
from vllm.logger import init_logger
from vllm.v1.attention.backend import AttentionMetadata, AttentionMetadataBuilder
from vllm.v1.attention.backend import CommonAttentionMetadata as Batch
from vllm.v1.attention.backends.utils import get_num_attention_heads_from_layers
from vllm.v1.kv_cache_interface import AttentionSpec

from kvpact.integrations.pages.page import codecs
from kvpact.integrations.pages.prompt import FEW, PromptRun, Scratch
from kvpact.integrations.pages.window import SLACK, Row, waves
from kvpact.integrations.vllm.calibrated import known_of
from kvpact.integrations.vllm.setting import native_plan, refuse, served_specs
from kvpact.kernels import Plan
from kvpact.spec import Spec

# vLLM configures loggers below "vllm" alone.
logger = init_logger(f"vllm.{__name__}")
CONNECTOR = "kvpact.integrations.vllm.connector.KVPactConnector"


@dataclass
class KVPactMetadata(AttentionMetadata):
    """One batch in waves, and their prompts' runs; `cut`: starts of cut sequences."""

    parts: list[tuple[list[Row], list[PromptRun]]]
    cut: set[int] = field(default_factory=set)


class KVPactBuilder(AttentionMetadataBuilder[KVPactMetadata]):
    """The builder of batches for attention: the sequences of each."""

    # Whether tokens are latents: vLLM's CPU kernel attends none of their prompts.
    latent: ClassVar[bool] = False

    def __init__(
        self,
        kv_cache_spec: AttentionSpec,
        layer_names: list[str],
        vllm_config: Any,
        device: torch.device,
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        _check(vllm_config, self.latent)
        self._rows: list[Row] = []
        self._scratch = None
        if device.type == "cpu" and not self.latent:
            self._scratch = _scratch(kv_cache_spec, layer_names, vllm_config)
        _log_start(kv_cache_spec, layer_names, vllm_config, device)

    def build(
        self, common_prefix_len: int, common_attn_metadata: Batch, fast_build: bool = False
    ) -> KVPactMetadata:
        """Return the rows of a batch."""
        batch = common_attn_metadata
        if batch.causal is not True:
            refuse("attention that is not causal")
        size: int = self.kv_cache_spec.block_size
        starts: list[int] = batch.query_start_loc_cpu[: batch.num_reqs + 1].tolist()
        lengths, tables = self._read(batch, size)
        # All layers compare the pages of a sequence with those of the last step: equal ones are
        # one object.
        known, rows = {row.pages: row.pages for row in self._rows}, []
        for i, length in enumerate(lengths):
            start, end = starts[i], starts[i + 1]
            if start < end:
                pages = tuple(tables[i, : -(-length // size)].tolist())
                pages = known.get(pages, pages)
                rows.append(Row(start, end, length - (end - start), pages))
        self._rows = rows
        scratch = self._scratch
        parts = [(part, scratch.plan(part) if scratch else []) for part in waves(rows, size)]
        return KVPactMetadata(parts)

    def _read(self, batch: Batch, size: int) -> tuple[list[int], Tensor]:
        """Return the tokens of each sequence, and the pages of all, where the host can read."""
        lengths: list[int] = batch.seq_lens[: batch.num_reqs].tolist()
        return lengths, batch.block_table_tensor


def _scratch(spec: AttentionSpec, layers: list[str], config: Any) -> Scratch | None:
    """Return the scratch over which vLLM's own kernel attends prompts; None where it does not."""
    from kvpact.integrations.vllm.cpu_attention import why_not

    model, dtype = config.model_config, config.model_config.dtype
    if reason := why_not(spec.head_size, spec.head_size_v, dtype):
        logger.info("kvpact attends prompts by its own kernels: no AMX for %s", reason)
        return None
    q_heads = get_num_attention_heads_from_layers(config, layers)
    q_heads = q_heads or model.get_num_attention_heads(config.parallel_config)
    longest = max(model.max_model_len, config.scheduler_config.max_num_batched_tokens)
    scratch = _shared_scratch(q_heads, spec.num_kv_heads, spec.head_size, dtype, longest)
    logger.info(
        "kvpact attends prompts by vLLM's own kernel (AMX), and at most %d new tokens of a "
        "sequence by its own; exact copies of the prompts that are attended take at most %.0f MB, "
        "once for all layers",
        FEW,
        scratch.nbytes / 1e6,
    )
    return scratch


@lru_cache(maxsize=1)
def _shared_scratch(
    q_heads: int, heads: int, dim: int, dtype: torch.dtype, longest: int
) -> Scratch:
    """Return one scratch for all layers, whatever their specs."""
    from kvpact.integrations.vllm.cpu_attention import OwnKernel

    return Scratch(OwnKernel(q_heads, heads, dim, dtype), heads, dim, dtype, longest)


def _check(config: Any, latent: bool) -> None:
    """Refuse settings that were never run, or could not be right."""
    parallel = config.parallel_config
    if getattr(config, "use_v2_model_runner", False):
        refuse("Model Runner V2, which it was never run with: VLLM_USE_V2_MODEL_RUNNER=0 takes V1")
    for there, what in (
        (config.model_config.is_hybrid, "hybrid models"),
        (config.model_config.enable_sleep_mode, "sleep mode"),
        (config.speculative_config is not None, "speculative decoding"),
        (_foreign_connector(config.kv_transfer_config), "KV connectors but KVPactConnector"),
        (parallel.decode_context_parallel_size > 1, "context parallelism"),
        (parallel.prefill_context_parallel_size > 1, "context parallelism"),
        (latent and parallel.tensor_parallel_size > 1, "tensor parallelism with latents (MLA)"),
        (
            bool(config.cache_config.kv_cache_dtype_skip_layers),
            "--kv-cache-dtype-skip-layers (a recipe with 'none' for these layers does the same)",
        ),
    ):
        if there:
            refuse(what)


def _foreign_connector(transfer: Any) -> bool:
    """Return whether a connector would move pages about which it knows nothing."""
    if transfer is None:
        return False
    module, _, name = CONNECTOR.rpartition(".")
    given: tuple[str, str] = (transfer.kv_connector_module_path, transfer.kv_connector)
    return given != (module, name)


def _log_start(spec: AttentionSpec, names: list[str], config: Any, device: torch.device) -> None:
    """Log the figures of the layers that store by one spec."""
    dtype = config.model_config.dtype
    layers = config.compilation_config.static_forward_context
    backend = layers[names[0]].attn_backend
    stored: Spec = backend.stored
    widths: tuple[int, int] = backend.widths(spec)
    pair = codecs(stored, *widths, dtype)
    plan: Plan = native_plan(*pair, dtype, device, backend.latent)
    plain = sum(widths) * dtype.itemsize
    content = spec.state_content_size_bytes
    # Layers with a sliding window know the bytes of other layers' tokens (`SlidingBackend.full`).
    backends = [layer.attn_backend for layer in layers.values() if hasattr(layer, "attn_backend")]
    others = [other.full for other in backends if hasattr(other, "full")]
    sliding = len(others)
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
    labels = {
        "model_name": config.model_config.served_model_name,
        "engine": str(config.parallel_config.data_parallel_index),
        "spec": str(stored),
        "layers": str(len(names)),
        "dtype": str(dtype).removeprefix("torch."),
    }
    figures = spec.page_size_bytes, spec.block_size, plain / content
    for name, value in zip(PAGES, figures, strict=True):
        _gauge(name, tuple(labels)).labels(**labels).set(value)
    every = served_specs(config.model_config.get_total_num_hidden_layers())
    if (known := known_of(config.model_config, every)) is not None:
        logger.info("kvpact's codecs learnt from %d tokens (%s)", known.held.tokens, known.name)
    if sliding:
        logger.info(
            "kvpact leaves %d layers with a sliding window to vLLM's own attention, in %s",
            sliding,
            dtype,
        )
    if padded := spec.page_size_padded:
        page = spec.unpadded_page_size_bytes
        larger = spec.block_size * max(others, default=0)
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
            "kvpact keeps the last %d tokens of each sequence exactly, outside the pages: %.2f MB "
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


PAGES = {
    "page_bytes": "Bytes of a page in one layer.",
    "page_tokens": "Tokens of a page.",
    "capacity_ratio": "How many times the tokens of pages in the dtype fit into the same memory.",
}
"""Names of the gauges, and what they show."""


@cache
def _gauge(name: str, labels: tuple[str, ...]) -> Any:
    """Return the gauge ``vllm:kvpact_…`` of `PAGES`."""
    from prometheus_client import Gauge

    return Gauge(f"vllm:kvpact_{name}", PAGES[name], labels, multiprocess_mode="mostrecent")
