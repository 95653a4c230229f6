"""`CompressedCache`: transformers' `Cache` with full-attention layers compressed."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig
from transformers.cache_utils import (
    DYNAMIC_LAYER_TYPE_MAPPING,
    Cache,
    get_layer_types_and_kwargs,
)

from kvpact.cache import ContiguousCache, cache_specs, merge_stats
from kvpact.cache.rows import refuse_pickling
from kvpact.errors import GeometryError, KVPactError, SnapshotError
from kvpact.geometry import CacheGeometry
from kvpact.integrations.transformers.attention import choose_attention
from kvpact.integrations.transformers.latent import hand_on
from kvpact.integrations.transformers.layer import CompressedHybridLayer, CompressedLayer
from kvpact.kernels import choose
from kvpact.recipe import SpecLike, layer_specs
from kvpact.snapshot import Identity, Snapshot
from kvpact.spec import Spec

_SPARSE = "indexed_attention"
_LAYERS = {"full_attention": CompressedLayer, "hybrid": CompressedHybridLayer}


class _NoMaximum(KVPactError, AttributeError):
    """`max_cache_len` was asked for: `hasattr` says no, and the message says what to do."""


class CompressedCache(Cache):
    """A compressed KV cache for `model(…, past_key_values=cache)` and `model.generate`.

    Full-attention layers are compressed; all others (sliding, chunked, linear, …) keep
    transformers' own cache layer. Attention goes over the packed slots if the model's attention
    implementation is ``kvpact``; any other sees decompressed K and V, which is right but slower.

    Models with latent attention (MLA: DeepSeek V2 and V3, …) cache a latent in K's place and the
    rotated part of the key in V's: the spec's method for K stores the latent, and 8-bit integers
    the rotated part unless the spec names a method for it behind the slash. Attention goes over the
    latents with the projections absorbed, without expanding them.

    Encoder-decoder models want ``EncoderDecoderCache(CompressedCache(…), DynamicCache(…))``: the
    cross-attention's K and V never grow. A cache can't be pickled (take a `snapshot`); `deepcopy`
    shares what neither side changes.

    Parameters
    ----------
    config : PreTrainedConfig
        `model.config`.
    spec : str, Spec, path or mapping
        A spec, or a recipe with a spec per layer (of the model's layers).
    attention : {"auto", "keep"}
        ``auto`` sets the config's attention implementation to ``kvpact`` where it is ``sdpa``; for
        every other cache that does exactly what ``sdpa`` does, and the config is as before when
        the last cache made for it is gone. ``keep`` leaves the config alone.
    exact_new : bool
        Whether new tokens are attended as given or as stored (see `AttendConfig`).
    backend, precision : str
        Who computes, and how (see `create_cache`).

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
        backend: str = "auto",
        precision: str = "full",
    ) -> None:
        chosen = self._compute = choose(backend, precision)
        decoder = config.get_text_config(decoder=True)
        types, options = get_layer_types_and_kwargs(decoder)
        specs = layer_specs(spec, len(types))
        latent_dim = getattr(decoder, "kv_lora_rank", None)
        layers: list[Any] = []
        for layer_type, layer_options, layer_spec in zip(types, options, specs, strict=True):
            if layer_type in _LAYERS:
                arguments = (layer_spec, exact_new, latent_dim, chosen, decoder)
                layers.append(_LAYERS[layer_type](*arguments, **layer_options))
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
        self._loan = choose_attention(decoder, attention, sparse=_SPARSE in types)
        self._pairs = config.is_encoder_decoder
        self._latest: tuple[int, int] | None = None
        if latent_dim:
            hand_on(decoder)

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Give a layer new tokens; return what stands for K and V of all (see `CompressedLayer`).

        Raises
        ------
        GeometryError
            The cache was given to an encoder-decoder model without one for its cross-attention.
        """
        if self._pairs:
            self._require_one_call(layer_idx, key_states.shape[2])
        layer: Any = self.layers[layer_idx]
        k, v = layer.update(key_states, value_states, *args, **kwargs)
        return k, v

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Tokens that a layer holds; models ask for it when a call begins."""
        self._latest = None
        length: int = super().get_seq_length(layer_idx)
        return length

    def _require_one_call(self, layer: int, tokens: int) -> None:
        """Raise if a layer is updated twice in one call: once by its cross-attention."""
        latest, self._latest = self._latest, (layer, tokens)
        if latest is not None and latest[0] == layer:
            twice: Any = self.layers[layer]
            twice.crop(-latest[1])
            raise GeometryError(
                "this model's cross-attention wants a cache of its own: pass past_key_values="
                "EncoderDecoderCache(CompressedCache(config, spec), DynamicCache(config=config))"
            )

    @property
    def max_cache_len(self) -> int:
        """Not there: a compressed cache has no maximum."""
        raise _NoMaximum(
            "a compressed cache has no max_cache_len. PEFT's prefix tuning asks for it, to put a "
            "cache of its own in the place of an empty one, so that nothing would be compressed: "
            "run prefix tuning without past_key_values"
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> CompressedCache:
        other = memo[id(self)] = object.__new__(type(self))
        vars(other).update({name: deepcopy(value, memo) for name, value in vars(self).items()})
        return other

    __reduce_ex__ = refuse_pickling

    def snapshot(
        self, *, token_ids: Tensor | None = None, identity: Identity | None = None
    ) -> Snapshot:
        """Return what all layers hold (see `ContiguousCache.snapshot`).

        Raises
        ------
        SnapshotError
            The model has layers that transformers caches itself (sliding, linear, …), which can't
            be saved; or nothing is held yet.
        GeometryError
            Layers have K and V of unlike shapes.
        """
        held = self.held()
        if held is None:
            raise SnapshotError("the cache is empty; run the model first")
        return held.snapshot(token_ids=token_ids, identity=identity)

    def restore(self, snapshot: Snapshot, *, device: torch.device | str = "cpu") -> None:
        """Hold what a snapshot holds, from whichever layout, on the model's `device`.

        Errors as in `ContiguousCache.restore`; the cache is as before then.

        Raises
        ------
        SnapshotError
            The model has layers that transformers caches itself.
        """
        self._require_all_compressed()
        count = len(self._compressed)
        specs = self.specs_for(snapshot.geometry)
        if snapshot.num_layers != count:
            raise GeometryError(f"{snapshot.num_layers} layers, the model has {count}")
        held, geometry = self._compressed[0].flushed(), snapshot.geometry
        if held is not None:
            mine = replace(held.geometry, num_layers=count, dtype=geometry.dtype)
            if mine != geometry:
                raise GeometryError(f"the snapshot is of {geometry}, the model's cache of {mine}")
        whole = ContiguousCache(specs, geometry, compute=self._compute)
        whole.restore(snapshot, device=device)
        for layer, cache in zip(self._compressed, whole.split(), strict=True):
            layer.take_over(cache)

    def held(self) -> ContiguousCache | None:
        """Return one cache of all layers, which it shares; None while one of them is empty.

        Raises
        ------
        SnapshotError
            The model has layers that transformers caches itself.
        """
        self._require_all_compressed()
        caches = [layer.flushed() for layer in self._compressed]
        held = [cache for cache in caches if cache is not None]
        return ContiguousCache.joined(held) if len(held) == len(caches) else None

    def specs_for(self, geometry: CacheGeometry) -> list[Spec]:
        """Return each compressed layer's spec, completed for a geometry with latents."""
        one = replace(geometry, num_layers=1)
        return [spec for layer in self._compressed for spec in cache_specs(layer.spec, one)]

    def _require_all_compressed(self) -> None:
        native = [layer for layer in self.layers if type(layer) is not CompressedLayer]
        if native:
            kinds = ", ".join(sorted({type(layer).__name__ for layer in native}))
            raise SnapshotError(
                f"{len(native)} layers are cached by transformers itself ({kinds}); their state "
                "can't be saved, so neither can this model's cache"
            )

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
