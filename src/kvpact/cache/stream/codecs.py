"""The specs of layers, as the geometry of a cache wants them, and their codecs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache

import torch
from torch import Tensor

from kvpact.cache.checks import KeyOffsets, check_layer
from kvpact.calibration import Calibration as ModelCalibration
from kvpact.errors import DtypeError, GeometryError, NonFiniteError, SpecError
from kvpact.geometry import CacheGeometry
from kvpact.kernels import RowOffset
from kvpact.key_offset import KeyOffset
from kvpact.methods import Codec, Method, make_codec
from kvpact.methods.fitted import FittedCodec
from kvpact.methods.integer import Integer
from kvpact.methods.none import Exact
from kvpact.methods.scaled import scaled_for
from kvpact.recipe import SpecLike, layer_specs
from kvpact.spec import Spec, parse_spec


def cache_specs(source: SpecLike | Sequence[Spec], geometry: CacheGeometry) -> list[Spec]:
    """Return a spec per layer: of a spec or recipe, completed for latents, or of a sequence."""
    if not isinstance(geometry, CacheGeometry):
        raise GeometryError(_no_geometry(source, geometry))
    if isinstance(source, Sequence) and not isinstance(source, str):
        if len(source) != geometry.num_layers:
            raise GeometryError(f"{len(source)} specs for {geometry.num_layers} layers")
        return list(source)
    specs = layer_specs(source, geometry.num_layers)
    return [latent_spec(spec) for spec in specs] if geometry.latent else specs


def _no_geometry(source: object, geometry: object) -> str:
    hint = "CacheGeometry.from_config(model.config) makes one"
    if isinstance(source, CacheGeometry):
        hint = f"the spec comes first: create_cache({str(geometry)!r}, geometry)"
    return f"geometry should be a CacheGeometry, not {type(geometry).__name__}; {hint}"


def latent_spec(spec: Spec, rope: str | None = None) -> Spec:
    """Return a spec for latents; without one for `k_rope` 8-bit integers, or exact with `none`."""
    two = spec.slashed or spec.key != spec.value
    if rope is not None:
        chosen = parse_spec(rope)
        if two or chosen.key != chosen.value:
            raise SpecError(
                f"spec {str(spec)!r} and rope={rope!r} name more than one method for k_rope"
            )
        return Spec(spec.key, chosen.value, slashed=True)
    if two or isinstance(spec.key, Exact):
        return spec
    return Spec(
        spec.key, Integer(bits=8, sinks=spec.key.sinks, window=spec.key.window), slashed=True
    )


@lru_cache(maxsize=256)
def codec_of(method: Method, key: bool, dim: int, dtype: torch.dtype) -> Codec:
    """Return the codec of a method for K or V before it learnt anything, one for all caches."""
    return make_codec(method, key, dim, dtype)


def codecs_of(spec: Spec, geometry: CacheGeometry, dtype: torch.dtype) -> tuple[Codec, Codec]:
    """Return the codecs of K and V, of a dtype where the geometry has none."""
    dtype = geometry.dtype or dtype
    key = codec_of(spec.key, True, geometry.head_dim, dtype)
    return key, codec_of(spec.value, False, geometry.value_dim, dtype)


Learnt = Tensor | Mapping[str, Tensor]
"""Tokens to learn from, `[B, H_kv, T, D]`, or what a codec learnt before (`Codec.state`)."""
Calibration = Mapping[int, tuple[Learnt, Learnt]] | ModelCalibration
"""Layer -> for K and for V; or what `kvpact calibrate` made."""


def states_of(
    calibration: Calibration | None,
    specs: Sequence[Spec],
    geometry: CacheGeometry,
    device: torch.device | str | None = None,
) -> Mapping[int, tuple[Learnt, Learnt]]:
    """Return what codecs learn from, or learnt, by layer, on a device. Raises `SpecError`."""
    if not isinstance(calibration, Mapping | ModelCalibration | None):
        calibration = ModelCalibration.load(calibration)  # type: ignore[unreachable]
    if isinstance(calibration, ModelCalibration):
        held = calibration.needed(specs)
        return (held if device is None else held.to(device)).states(specs, geometry)
    return calibration or {}


def layer_codecs(
    specs: Sequence[Spec],
    geometry: CacheGeometry,
    calibration: Calibration | None,
    offsets: KeyOffsets | None = None,
) -> list[tuple[Codec, Codec]]:
    """Return the codecs of K and V per layer, fitted; calibration keys begin at position 0."""
    given = states_of(calibration, specs, geometry)
    for layer in given:
        check_layer(layer, len(specs))
    pairs = []
    for layer, spec in enumerate(specs):
        k, v = codecs_of(spec, geometry, geometry.dtype or _dtype(layer, given))
        if layer in given:
            k, v = (
                _fitted(codec, learnt, geometry.num_kv_heads, offset)
                for codec, learnt, offset in zip(
                    (k, v), given[layer], ((offsets or {}).get(layer), None), strict=True
                )
            )
        pairs.append((k, v))
    return pairs


def _dtype(layer: int, given: Mapping[int, tuple[Learnt, Learnt]]) -> torch.dtype:
    """Return the dtype of a layer's calibration tokens, checked to be tokens or states."""
    dtype = torch.float32
    if layer not in given:
        return dtype
    pair = given[layer]
    if not isinstance(pair, Sequence) or len(pair) != 2:
        raise DtypeError(f"calibration of layer {layer} should be a pair, for K and for V")
    for learnt in pair:
        if isinstance(learnt, Tensor) and learnt.is_floating_point():
            dtype = learnt.dtype
        elif not isinstance(learnt, Mapping):
            raise DtypeError(
                f"calibration of layer {layer} should be floating-point tokens or states"
            )
    return dtype


def _fitted(codec: Codec, learnt: Learnt, heads: int, offset: KeyOffset | None) -> Codec:
    if not isinstance(codec, FittedCodec):
        return codec
    if isinstance(learnt, Mapping):
        if not learnt:
            return codec
        codec = codec.restore(learnt)
        codec.check_heads(heads)
        return codec
    if learnt.dim() == 4 and learnt.shape[1] != heads:
        raise GeometryError(f"calibration tokens have {learnt.shape[1]} heads, the cache {heads}")
    if offset is not None and learnt.dim() == 4:
        learnt = RowOffset(offset).without(learnt, 0).to(learnt.dtype)
    return codec.fit(learnt)


def small_sizes(sizes: Sequence[float], shared: tuple[Codec, Codec] | None) -> tuple[float, float]:
    """Return the largest magnitudes of K and V; `NonFiniteError` where pages share codecs."""
    for name, codec, size in zip("kv", shared or (), sizes, strict=False):
        if scaled_for(codec, size) is not codec:
            raise NonFiniteError(
                f"{name} has no number above {size:.3g}, too small for pages, whose sequences "
                "share a codec; scale it up, take a contiguous cache, or keep this layer at 'none'"
            )
    return sizes[0], sizes[1]
