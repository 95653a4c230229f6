"""What caches would hold, counted from formats and shapes; nothing is allocated."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

from kvpact.cache import cache_specs, planned_bytes, unplanned
from kvpact.cli.inputs import dtype_of, require
from kvpact.errors import GeometryError
from kvpact.geometry import CacheGeometry
from kvpact.integrations.layer_shape import LayerShape
from kvpact.recipe import SpecLike, layer_specs
from kvpact.spec import Spec

PARTS = ("slots", "factors", "sinks", "window", "unused")
"""Of compressed layers: packed slots, what codecs learn, exact tokens, allocated and not used."""
MOST_LAYERS = 4096
"""Of a model, which is built without weights to see what it caches."""


@dataclass(frozen=True)
class Layers:
    """The layers of a model's cache; `dtype` is that of all that is not compressed."""

    shapes: Sequence[LayerShape]
    dtype: torch.dtype
    positions: int | None = None

    def counted(self) -> list[dict[str, Any]]:
        """Return each shape once, with the number of layers that have it as ``count``."""
        return [{"count": n, **shape._asdict()} for shape, n in Counter(self.shapes).items()]

    def values(self, tokens: int, batch: int) -> int:
        """Return how many numbers of K and V the compressed layers hold."""
        shapes = (x for x in self.shapes if x.compressed)
        return batch * tokens * sum(x.heads * (x.key_dim + x.value_dim) for x in shapes)


def layers_of_model(name: str, dtype: str | None) -> Layers:
    """Return the layers of a model, of which the config alone is loaded."""
    chosen = dtype_of(dtype) if dtype is not None else None
    require("transformers", extra="transformers")
    from kvpact.integrations.models import load_config
    from kvpact.integrations.transformers.shapes import layer_shapes

    config = load_config(name)
    chosen = chosen or _dtype(config)
    decoder = config.get_text_config(decoder=True)
    layers = getattr(decoder, "num_hidden_layers", 1)
    if not 1 <= layers <= MOST_LAYERS:
        raise GeometryError(f"{name} tells of {layers} layers; 1 to {MOST_LAYERS} can be looked at")
    positions = getattr(decoder, "max_position_embeddings", None)
    return Layers(layer_shapes(config, chosen), chosen, positions)


def layers_of_numbers(numbers: Mapping[str, Any], v_head_dim: int | None, dtype: str) -> Layers:
    """Return equal layers with full attention, of ``layers``, ``kv_heads`` and ``head_dim``."""
    layers, heads, width = (numbers[name] for name in ("layers", "kv_heads", "head_dim"))
    geometry = CacheGeometry(layers, heads, width, v_head_dim, dtype_of(dtype))
    shape = LayerShape("full_attention", True, heads, width, geometry.value_dim)
    return Layers([shape] * layers, dtype_of(dtype))


def _dtype(config: Any) -> torch.dtype:
    """Return a model's dtype; float16, in which it is served, where that is wider or unknown."""
    named = getattr(config, "dtype", None) or config.get_text_config(decoder=True).dtype
    return named if isinstance(named, torch.dtype) and named.itemsize <= 2 else torch.float16


def planned(spec: SpecLike, layers: Layers, tokens: int, batch: int) -> dict[str, Any]:
    """Return the bytes of a cache.

    `PARTS`; ``compressed``, their sum, which is what `memory_usage` of such a cache counts;
    ``own``, what transformers holds of other layers; ``total`` of both; ``exact``, the total with
    K and V in 16 bits; ``bits_per_value`` of the compressed layers (None without values).
    """
    found = Counter(dict.fromkeys(PARTS, 0))
    for each, shape in _pairs(spec, layers):
        found.update(_layer_bytes(each, shape.geometry(layers.dtype), tokens, batch))
    compressed, values = sum(found.values()), layers.values(tokens, batch)
    width = layers.dtype.itemsize
    own = sum(shape.own_bytes(tokens, batch, width) for shape in layers.shapes)
    return {
        **found,
        "compressed": compressed,
        "own": own,
        "total": compressed + own,
        "exact": 2 * values + own,
        "bits_per_value": 8 * compressed / values if values else None,
    }


def not_planned(spec: SpecLike, layers: Layers) -> list[str]:
    """Return what only the tokens decide, in words."""
    pairs = dict.fromkeys(_pairs(spec, layers))
    return sorted(
        {x for each, shape in pairs for x in unplanned(each, shape.geometry(layers.dtype))}
    )


def _pairs(spec: SpecLike, layers: Layers) -> list[tuple[Spec, LayerShape]]:
    """Return the spec and the shape of each compressed layer."""
    specs = layer_specs(spec, len(layers.shapes))
    return [
        (cache_specs(each, shape.geometry(layers.dtype))[0], shape)
        for each, shape in zip(specs, layers.shapes, strict=True)
        if shape.compressed
    ]


@lru_cache(maxsize=256)
def _layer_bytes(spec: Spec, geometry: CacheGeometry, tokens: int, batch: int) -> dict[str, int]:
    found = planned_bytes(spec, geometry, tokens, batch)
    return {name: found[name] for name in PARTS}
