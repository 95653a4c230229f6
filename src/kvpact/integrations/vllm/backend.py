"""vLLM's side: an attention backend whose pages are kvpact's; for GPUs `cuda` adds to it.

vLLM makes one class of each kind per process. `customize_spec` tells it the size of a page, so the
capacity that it reports and schedules by is that of packed slots.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from inspect import signature
from typing import Any, ClassVar

import torch
from torch import Tensor
from vllm.config import get_current_vllm_config
from vllm.logger import init_logger
from vllm.v1.attention.backend import AttentionBackend, AttentionImpl, AttentionType, MultipleOf
from vllm.v1.kv_cache_interface import (
    AttentionSpec,
    FullAttentionSpec,
    KVCacheLayout,
    SlidingWindowSpec,
)

from kvpact.contract import AttendConfig
from kvpact.errors import NonFiniteError
from kvpact.formats import TILE
from kvpact.integrations.calibrated import NOTHING, Learnt
from kvpact.integrations.pages.damage import watch_of
from kvpact.integrations.pages.layer import PagedLayer
from kvpact.integrations.pages.page import PageForm, codecs
from kvpact.integrations.pages.window import WindowPool
from kvpact.integrations.vllm.builder import KVPactBuilder, KVPactMetadata
from kvpact.integrations.vllm.dtype import DTYPE, TAKEN
from kvpact.integrations.vllm.setting import (
    give_backends,
    hand_over,
    native_plan,
    refuse,
    served_specs,
)
from kvpact.methods.fitted import FittedCodec
from kvpact.spec import Spec

# vLLM configures loggers below "vllm" alone.
logger = init_logger(f"vllm.{__name__}")


def _impl(*given: Any, **named: Any) -> AttentionImpl[Any]:
    """Return the attention of a layer on a CPU: vLLM's own where it has a sliding window."""
    options = signature(KVPactImpl).bind(*given, **named).arguments
    if options.get("sliding_window") is None:
        return KVPactImpl(**options)
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl

    if options.get("kv_cache_dtype") == DTYPE:
        options["kv_cache_dtype"] = "auto"
    return CPUAttentionBackendImpl(**options)


class KVPactBackend(AttentionBackend):
    """The replacement of vLLM's CPU attention, under its `name`."""

    name: ClassVar[str] = "CPU_ATTN"
    impl: ClassVar[Callable[..., AttentionImpl[Any]]] = _impl
    builder: ClassVar[type[KVPactBuilder]] = KVPactBuilder
    stored: ClassVar[Spec | None] = None  # until the model is loaded (`give_backends`)
    page_format: ClassVar[type[AttentionSpec]] = FullAttentionSpec
    latent: ClassVar[bool] = False  # K and V are MLA latents and rotated keys
    forward_includes_kv_cache_update: bool = True
    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16, torch.float32]
    supported_kv_cache_dtypes: ClassVar[list[str]] = list(TAKEN)

    @classmethod
    def get_name(cls) -> str:
        """Return vLLM's name of the backend that is replaced."""
        return cls.name

    @classmethod
    def get_impl_cls(cls) -> Callable[..., AttentionImpl[Any]]:
        """Return the constructor of a layer's attention."""
        return cls.impl

    @classmethod
    def get_builder_cls(cls) -> type[KVPactBuilder]:
        """Return the class that builds its batches."""
        return cls.builder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[MultipleOf]:
        """Take pages of whole tiles."""
        return [MultipleOf(TILE)]

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[KVCacheLayout, ...]:
        """Take pages in which the bytes of a head lie together."""
        return (KVCacheLayout.LBHNC,)

    @classmethod
    def customize_spec(cls, spec: AttentionSpec) -> AttentionSpec:
        """Return a layer's page format: the same tokens in as many bytes as their slots have."""
        if spec.state_content_bytes is not None:
            return spec
        if isinstance(spec, SlidingWindowSpec):
            refuse("models whose layers all have a sliding window: nothing of them is compressed")
        if type(spec) is not cls.page_format or cls.stored is None:
            refuse(f"layers of {type(spec).__name__} with {cls.__name__}")
        pair = codecs(cls.stored, *cls.widths(spec), spec.dtype)
        form = PageForm(*pair, spec.block_size)
        return replace(spec, state_content_bytes=form.content, dtype=torch.uint8)

    @classmethod
    def widths(cls, spec: AttentionSpec) -> tuple[int, int]:
        """Return the widths of K and V."""
        return spec.head_size, spec.head_size_v


@cache
def stored_backend(plain: type[KVPactBackend], spec: Spec, **more: Any) -> type[KVPactBackend]:
    """Return the class of layers that store by a spec, with `more` attributes."""
    return type(f"{plain.__name__} {spec}", (plain,), {"stored": spec, **more})


def _sliding_backend(full: int) -> type[AttentionBackend]:
    from kvpact.integrations.vllm.cpu_attention import sliding_backend

    return sliding_backend(full)


class KVPactImpl(AttentionImpl[KVPactMetadata]):
    """Attention of one layer, as of vLLM's `AttentionImpl`."""

    cut: ClassVar[int] = 0  # this process's cut requests
    learnt: Learnt = NOTHING

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        sinks: Tensor | None = None,
    ) -> None:
        for given, what in (
            (alibi_slopes, "ALiBi"),
            (sliding_window, "sliding windows"),
            (kv_sharing_target_layer_name, "layers that share another layer's cache"),
            (sinks, "attention sinks with logits of their own"),
        ):
            if given is not None:
                refuse(what)
        if kv_cache_dtype not in TAKEN:
            refuse(f"--kv-cache-dtype {kv_cache_dtype} (it stores what its spec says)")
        if attn_type != AttentionType.DECODER:
            refuse(f"{attn_type} attention")
        self.num_heads, self.head_size, self.scale = num_heads, head_size, float(scale)
        self.num_kv_heads = num_kv_heads or num_heads
        self.kv_cache_dtype = "auto"
        self._config = AttendConfig(
            softmax_scale=self.scale, softcap=logits_soft_cap if logits_soft_cap else None
        )
        config = get_current_vllm_config()
        self._vllm_config = config
        self._sequences: int = config.scheduler_config.max_num_seqs
        self._cache_config = config.cache_config
        self._windows: WindowPool | None = None
        self._model = config.model_config
        self._layers: dict[str, Any] = config.compilation_config.static_forward_context
        self._layer: PagedLayer | None = None

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
        """Give all layers of the model, which are there now, the backend of their kind."""
        specs = served_specs(self._model.get_total_num_hidden_layers())
        kinds = stored_backend, _sliding_backend
        dtype = self._model.dtype
        names = give_backends(self._layers, KVPactBackend, specs, *kinds, dtype)
        hand_over(self._layers, names, self._vllm_config)

    def forward(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: KVPactMetadata | None,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        """Attend and store; parameters as of vLLM's `AttentionImpl.forward`."""
        if output_scale is not None or output_block_scale is not None:
            refuse("outputs that attention quantises")
        stored: Spec = layer.attn_backend.stored
        if attn_metadata is None:  # vLLM warms up, and counts what memory a GPU has left
            self._pool(stored, key, value, self._cache_config.block_size)
            return output.zero_()
        if self._layer is None or self._layer.pages is not kv_cache:
            windows = self._pool(stored, key, value, kv_cache.shape[2])
            self._layer = self._paged(layer.attn_backend, key, value, kv_cache, windows)
        cut: dict[int, NonFiniteError] = {}
        for rows, prompts in attn_metadata.parts:
            cut |= self._layer.step(rows, query, key, value, output, self._config, prompts)
        if cut.keys() - attn_metadata.cut:
            KVPactImpl.cut += len(cut.keys() - attn_metadata.cut)
            attn_metadata.cut |= cut.keys()
            logger.error(
                "kvpact could not store a token in %s: %s. Its request gets NaN from there on, as "
                "from vLLM's own cache, and so does who shares the page; others are not touched. "
                "Requests cut so far: %d",
                layer.layer_name,
                next(iter(cut.values())),
                KVPactImpl.cut,
            )
        return output

    def loaded(self, pages: Sequence[int]) -> None:
        """Note that the connector filled these pages."""
        if self._layer is not None:  # a layer made later knows of no page yet
            self._layer.loaded(pages)

    def damaged(self, pages: Sequence[int]) -> bool:
        """Return whether one of these pages holds tokens that could not be stored."""
        return self._layer is not None and self._layer.damage.among(pages)

    def _pool(self, stored: Spec, key: Tensor, value: Tensor, page_tokens: int) -> WindowPool:
        if self._windows is None or self._windows.page_tokens != page_tokens:
            shapes = ((key.shape[1], key.shape[2]), (value.shape[1], value.shape[2]))
            width, count = stored.key.window, self._sequences
            self._windows = WindowPool(width, count, page_tokens, shapes, key.dtype, key.device)
        return self._windows

    def _paged(
        self, backend: Any, key: Tensor, value: Tensor, pages: Tensor, windows: WindowPool
    ) -> PagedLayer:
        k, v = codecs(backend.stored, key.shape[2], value.shape[2], key.dtype, self.learnt)
        if isinstance(k, FittedCodec):
            k.check_heads(key.shape[1])
        plan = native_plan(k, v, key.dtype, key.device, backend.latent)
        watch = watch_of(key.device.type)
        good = None if watch is None else watch.flags(len(pages))
        form = PageForm(k, v, pages.shape[2])
        layer = PagedLayer(form, plan, pages, windows, good, backend.latent)
        if watch is not None:
            watch.add(layer.damage)
        return layer
