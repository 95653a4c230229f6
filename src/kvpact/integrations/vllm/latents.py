"""vLLM's side of multi-head latent attention (MLA), on its CPU worker: pages of packed latents.

A page holds latents in K's place and rotated keys in V's, as in `kvpact.MLACache`.
"""

from dataclasses import dataclass
from inspect import signature
from typing import Any, ClassVar, NoReturn

import torch
from torch import Tensor
from vllm.v1.attention.backend import AttentionBackend
from vllm.v1.attention.backend import CommonAttentionMetadata as Batch
from vllm.v1.kv_cache_interface import AttentionSpec, MLAAttentionSpec

from kvpact.cache.stream.codecs import latent_spec
from kvpact.integrations.calibrations import learning
from kvpact.integrations.vllm.backend import KVPactBackend, KVPactImpl, stored_backend
from kvpact.integrations.vllm.builder import KVPactBuilder, KVPactMetadata
from kvpact.integrations.vllm.setting import refuse, served_specs, specs_of
from kvpact.kernels import absorb_query, expand_output


@dataclass
class LatentMetadata(KVPactMetadata):
    """One batch, all for `forward_mha`: what vLLM counts as decodes lacks the new latents."""

    num_actual_tokens: int = 0
    num_prefills: int = 0
    num_decodes: int = 0
    num_decode_tokens: int = 0


class LatentBuilder(KVPactBuilder):
    """The builder of batches for attention; parameters as of `KVPactBuilder`."""

    latent: ClassVar[bool] = True

    def build(
        self, common_prefix_len: int, common_attn_metadata: Batch, fast_build: bool = False
    ) -> LatentMetadata:
        """Return the rows of a batch."""
        made = super().build(common_prefix_len, common_attn_metadata, fast_build)
        tokens, sequences = common_attn_metadata.num_actual_tokens, common_attn_metadata.num_reqs
        return LatentMetadata(made.parts, made.cut, tokens, sequences)


class LatentImpl(KVPactImpl):
    """Attention of one layer; parameters as of vLLM's `MLAAttentionImpl`."""

    def __init__(
        self, *given: Any, qk_nope_head_dim: int, indexer: object | None = None, **named: Any
    ) -> None:
        if indexer is not None:
            refuse("sparse attention over latents")
        common = signature(KVPactImpl).parameters.keys() & named.keys()
        super().__init__(*given, **{name: named[name] for name in common})
        self._nope = qk_nope_head_dim
        self._own: Any = None

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
        """Give all layers over latents, which are there now, the backend of their spec."""
        specs = [latent_spec(s) for s in served_specs(self._model.get_total_num_hidden_layers())]
        if learning(specs):
            refuse("specs that learn from latents (MLA): take 'turboquant:bits=4,sinks=0'")
        layers = {
            name: layer
            for name, layer in self._layers.items()
            if getattr(layer, "attn_backend", None) is LatentBackend
        }
        for layer, spec in zip(layers.values(), specs_of(tuple(layers), specs), strict=True):
            parts = (layer.kv_lora_rank, layer.qk_rope_head_dim)
            layer.attn_backend = stored_backend(LatentBackend, spec, parts=parts)

    def do_kv_cache_update(self, *_: Any) -> None:
        """Pass: new tokens are stored when they have been attended."""

    def forward_mha(
        self,
        q: Tensor,
        kv_c_normed: Tensor,
        k_pe: Tensor,
        kv_c_and_k_pe_cache: Tensor,
        attn_metadata: LatentMetadata,
        k_scale: Tensor,
        output: Tensor,
        output_scale: Tensor | None = None,
    ) -> None:
        """Attend and store; parameters as of vLLM's `MLAAttentionImpl.forward_mha`."""
        if self._own is None:
            # vLLM hands over no layer here, and the layer has the weights.
            self._own = next(x for x in self._layers.values() if getattr(x, "impl", None) is self)
        nope, rope = q.transpose(0, 1).unsqueeze(0).tensor_split([self._nope], dim=-1)
        query = absorb_query(nope, rope, self._own.W_UK_T)[0].transpose(0, 1)
        latents = kv_c_normed.unsqueeze(1)
        mean = q.new_empty(*q.shape[:2], kv_c_normed.shape[1])
        pages = kv_c_and_k_pe_cache.unsqueeze(1)
        self.forward(
            self._own, query, latents, k_pe, pages, attn_metadata, mean, output_scale=output_scale
        )
        heads = expand_output(mean.transpose(0, 1).unsqueeze(0), self._own.W_UV.mT)[0]
        output.copy_(heads.transpose(0, 1).flatten(1))


class LatentBackend(KVPactBackend):
    """The replacement of vLLM's attention over latents (AMX); `parts`: widths of these and keys."""

    name = "AMX_MLA"
    impl = LatentImpl
    builder = LatentBuilder
    page_format: ClassVar[type[AttentionSpec]] = MLAAttentionSpec
    latent: ClassVar[bool] = True
    parts: ClassVar[tuple[int, int]]

    @classmethod
    def is_mla(cls) -> bool:
        """Return True: the layers hold latents."""
        return True

    @classmethod
    def widths(cls, spec: AttentionSpec) -> tuple[int, int]:
        """Return the widths of a latent and of a rotated key; `spec` knows their sum."""
        return cls.parts


class OtherLatentBackend(AttentionBackend):
    """A backend that refuses latent attention (MLA) in all places but that of `LatentBackend`."""

    @staticmethod
    def get_name() -> NoReturn:
        """Refuse."""
        refuse("multi-head latent attention (MLA) but in the place of AMX_MLA, on CPUs with AMX")

    get_impl_cls = get_builder_cls = get_name

    @classmethod
    def validate_configuration(cls, *_: Any, **__: Any) -> NoReturn:
        """Refuse."""
        cls.get_name()
