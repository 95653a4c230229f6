"""The spec of each layer, as the geometry of a cache wants it."""

from __future__ import annotations

from collections.abc import Sequence

from kvpact.errors import GeometryError, SpecError
from kvpact.geometry import CacheGeometry
from kvpact.methods.integer import Integer
from kvpact.methods.none import Exact
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
