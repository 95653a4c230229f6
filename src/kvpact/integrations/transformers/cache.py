"""`CompressedCache`: transformers' `Cache` with full-attention layers compressed."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedConfig
from transformers.cache_utils import (
    DYNAMIC_LAYER_TYPE_MAPPING,
    Cache,
    get_layer_types_and_kwargs,
)

from kvpact.cache import merge_stats
from kvpact.errors import KVPactError
from kvpact.integrations.transformers.attention import choose_attention
from kvpact.integrations.transformers.layer import CompressedLayer
from kvpact.methods.integer import Integer
from kvpact.methods.none import Exact
from kvpact.recipe import SpecLike, layer_specs
from kvpact.spec import Spec


def _for_latents(spec: Spec) -> Spec:
    """Return the spec with 8-bit integers for the rotated part of the key, which needs them."""
    if isinstance(spec.key, Exact):
        return Spec(spec.key, spec.key)
    rope = Integer(bits=8, sinks=spec.key.sinks, window=spec.key.window)
    return Spec(spec.key, rope)


class CompressedCache(Cache):
    """A compressed KV cache for `model(…, past_key_values=cache)` and `model.generate`.

    Full-attention layers are compressed; all others (sliding, chunked, linear, …) keep
    transformers' own cache layer. Attention goes over the packed slots if the model's attention
    implementation is ``kvpact``; any other sees decompressed K and V, which is right but slower.

    Models with latent attention (MLA: DeepSeek V2 and V3, …) cache a latent in K's place and the
    rotated part of the key in V's: the spec's method for K stores the latent, and 8-bit integers
    the rotated part, whatever the spec says of V.

    Parameters
    ----------
    config : PreTrainedConfig
        `model.config`.
    spec : str, Spec, path or mapping
        A spec, or a recipe with a spec per layer (of the model's layers).
    attention : {"auto", "keep"}
        ``auto`` sets the config's attention implementation to ``kvpact`` where it is ``sdpa``; for
        every other cache that does exactly what ``sdpa`` does. ``keep`` leaves the config alone.
    exact_new : bool
        Whether new tokens are attended as given or as stored (see `AttendConfig`).

    Raises
    ------
    SpecError
        The spec or `attention` is not known.
    KVPactError
        A layer type is not known, or no layer can be compressed.
    """

    def __init__(
        self,
        config: PreTrainedConfig,
        spec: SpecLike,
        *,
        attention: str = "auto",
        exact_new: bool = True,
    ) -> None:
        decoder = config.get_text_config(decoder=True)
        types, options = get_layer_types_and_kwargs(decoder)
        specs = layer_specs(spec, len(types))
        if getattr(decoder, "kv_lora_rank", None):
            specs = [_for_latents(each) for each in specs]
        layers: list[Any] = []
        for layer_type, layer_options, layer_spec in zip(types, options, specs, strict=True):
            if layer_type == "full_attention":
                layers.append(CompressedLayer(layer_spec, exact_new))
            elif layer_type in DYNAMIC_LAYER_TYPE_MAPPING:
                layers.append(DYNAMIC_LAYER_TYPE_MAPPING[layer_type](**layer_options))
            else:
                raise KVPactError(f"layer type {layer_type!r} is not known to this transformers")
        self._compressed = [layer for layer in layers if isinstance(layer, CompressedLayer)]
        if not self._compressed:
            raise KVPactError(
                f"no layer of this model has full attention ({', '.join(sorted(set(types)))}); "
                "there is nothing to compress"
            )
        super().__init__(layers=layers)
        choose_attention(decoder, attention)

    def _stats(self) -> list[dict[str, Any]]:
        caches = [layer.flushed() for layer in self._compressed]
        return [cache.stats() for cache in caches if cache is not None]

    def memory_usage(self) -> int:
        """Bytes held by the compressed layers."""
        caches = [layer.flushed() for layer in self._compressed]
        return sum(cache.memory_usage() for cache in caches if cache is not None)

    def stats(self) -> dict[str, Any]:
        """Return what the compressed layers hold (see `kvpact.cache.stats`).

        ``layers`` counts ``compressed`` layers and ``native`` ones, which transformers caches
        itself and whose bytes are not in the figures.

        Raises
        ------
        KVPactError
            Nothing is held yet.
        """
        parts = self._stats()
        if not parts:
            raise KVPactError("the cache is empty; run the model first")
        counts = {
            "compressed": len(self._compressed),
            "native": len(self.layers) - len(self._compressed),
        }
        return {**merge_stats(parts), "layers": counts}
