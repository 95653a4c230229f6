"""What caches would hold, counted from formats and shapes; nothing is allocated.

What models that people run cache, and what slots of usual specs take, stands in data/models.json:
of these, sizes are known without transformers and torch, which take seconds to import.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvpact.cli.inputs import dtype_of, require
from kvpact.data import model_table
from kvpact.errors import GeometryError
from kvpact.integrations.layer_shape import LayerShape
from kvpact.recipe import SpecLike, layer_specs
from kvpact.units import StreamFacts

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    from kvpact.geometry import CacheGeometry
    from kvpact.spec import Spec

PARTS = ("slots", "factors", "sinks", "window", "unused")
"""Of compressed layers: packed slots, what codecs learn, exact tokens, allocated and not used."""
MOST_LAYERS = 4096
"""Of a model, which is built without weights to see what it caches."""


@dataclass(frozen=True)
class Layers:
    """The layers of a model's cache; `dtype` is that of all that is not compressed."""

    shapes: Sequence[LayerShape]
    dtype: str
    positions: int | None = None

    def counted(self) -> list[dict[str, Any]]:
        """Return each shape once, with the number of layers that have it as ``count``."""
        return [{"count": n, **shape._asdict()} for shape, n in Counter(self.shapes).items()]

    @property
    def itemsize(self) -> int:
        """Bytes of a number that is not compressed."""
        return 4 if self.dtype == "float32" else 2

    def values(self, tokens: int, batch: int) -> int:
        """Return how many numbers of K and V the compressed layers hold."""
        shapes = (x for x in self.shapes if x.compressed)
        return batch * tokens * sum(x.heads * (x.key_dim + x.value_dim) for x in shapes)


def known_name(name: str) -> str | None:
    """Return a model's name in data/models.json, given this or its hub id; a folder goes first."""
    names = {model["hub"].lower(): known for known, model in model_table()["models"].items()}
    known = names.get(name.lower(), name.lower())
    return known if known in model_table()["models"] and not Path(name).exists() else None


def layers_of_model(name: str, dtype: str | None = None) -> Layers:
    """Return the layers of a model, of which the config alone is loaded, or none of it."""
    known = known_name(name)
    if known is None or dtype == "float32":
        return _layers_of_config(name, known, dtype)
    if dtype is not None:
        dtype_of(dtype)
    model = model_table()["models"][known]
    kinds = [LayerShape(**kind) for kind in model["kinds"]]
    shapes = [kinds[int(digit)] for digit in model["order"]]
    return Layers(shapes, dtype or "bfloat16", model["config"].get("max_position_embeddings"))


def _layers_of_config(name: str, known: str | None, dtype: str | None) -> Layers:
    chosen = dtype_of(dtype) if dtype is not None else None
    require("transformers", extra="transformers")
    from transformers import AutoConfig

    from kvpact.integrations.models import load_config
    from kvpact.integrations.transformers.shapes import layer_shapes

    if known is None:
        config: PreTrainedConfig = load_config(name)
    else:
        config = AutoConfig.for_model(**model_table()["models"][known]["config"])
    chosen = chosen or _dtype(config)
    decoder = config.get_text_config(decoder=True)
    layers = getattr(decoder, "num_hidden_layers", 1)
    if not 1 <= layers <= MOST_LAYERS:
        raise GeometryError(f"{name} tells of {layers} layers; 1 to {MOST_LAYERS} can be looked at")
    positions = getattr(decoder, "max_position_embeddings", None)
    return Layers(layer_shapes(config, chosen), str(chosen).removeprefix("torch."), positions)


def layers_of_numbers(numbers: Mapping[str, Any], v_head_dim: int | None, dtype: str) -> Layers:
    """Return equal layers with full attention, of ``layers``, ``kv_heads`` and ``head_dim``."""
    layers, heads, width = (numbers[name] for name in ("layers", "kv_heads", "head_dim"))
    from kvpact.geometry import CacheGeometry

    geometry = CacheGeometry(layers, heads, width, v_head_dim, dtype_of(dtype))
    shape = LayerShape("full_attention", True, heads, width, geometry.value_dim)
    return Layers([shape] * layers, dtype)


def _dtype(config: Any) -> Any:
    """Return a model's dtype; float16, in which it is served, where that is wider or unknown."""
    import torch

    named = getattr(config, "dtype", None) or config.get_text_config(decoder=True).dtype
    return named if isinstance(named, torch.dtype) and named.itemsize <= 2 else torch.float16


def planned(spec: SpecLike, layers: Layers, tokens: int, batch: int) -> dict[str, Any]:
    """Return the bytes of a cache.

    `PARTS`; ``compressed``, their sum, which is what `memory_usage` of such a cache counts;
    ``own``, what transformers holds of other layers; ``total`` of both; ``exact``, the total with
    K and V in 16 bits; ``bits_per_value`` of the compressed layers (None without values).
    """
    found = Counter(dict.fromkeys(PARTS, 0))
    for part in _known_parts(spec, layers, tokens, batch) or [
        _layer_bytes(each, shape.geometry(dtype_of(layers.dtype)), tokens, batch)
        for each, shape in _pairs(spec, layers)
    ]:
        found.update(part)
    compressed, values = sum(found.values()), layers.values(tokens, batch)
    own = sum(shape.own_bytes(tokens, batch, layers.itemsize) for shape in layers.shapes)
    return {
        **found,
        "compressed": compressed,
        "own": own,
        "total": compressed + own,
        "exact": 2 * values + own,
        "bits_per_value": 8 * compressed / values if values else None,
    }


def _known_parts(
    spec: SpecLike, layers: Layers, tokens: int, batch: int
) -> list[dict[str, int]] | None:
    """Return the parts of each compressed layer; None where data/models.json lacks its slots."""
    slots = model_table()["slots"].get(spec) if isinstance(spec, str) else None
    shapes = [x for x in layers.shapes if x.compressed]
    widths = [f"{x.key_dim},{x.value_dim},{x.latent:d}" for x in shapes]
    if layers.itemsize != 2 or slots is None or not slots.keys() >= set(widths):
        return None
    parts = []
    for shape, width in zip(shapes, widths, strict=True):
        for side in slots[width]:
            facts = StreamFacts(*side)
            facts = facts._replace(state=facts.state * shape.heads)
            parts.append(facts.held(tokens, batch, shape.heads, layers.itemsize))
    return parts


def not_planned(spec: SpecLike, layers: Layers) -> list[str]:
    """Return what only the tokens decide, in words."""
    if _known_parts(spec, layers, 0, 1) is not None:
        return []
    from kvpact.cache import unplanned

    pairs, dtype = dict.fromkeys(_pairs(spec, layers)), dtype_of(layers.dtype)
    return sorted({x for each, shape in pairs for x in unplanned(each, shape.geometry(dtype))})


def _pairs(spec: SpecLike, layers: Layers) -> list[tuple[Spec, LayerShape]]:
    """Return the spec and the shape of each compressed layer."""
    from kvpact.cache import cache_specs

    specs, dtype = layer_specs(spec, len(layers.shapes)), dtype_of(layers.dtype)
    return [
        (cache_specs(each, shape.geometry(dtype))[0], shape)
        for each, shape in zip(specs, layers.shapes, strict=True)
        if shape.compressed
    ]


@lru_cache(maxsize=256)
def _layer_bytes(spec: Spec, geometry: CacheGeometry, tokens: int, batch: int) -> dict[str, int]:
    from kvpact.cache import planned_bytes

    found = planned_bytes(spec, geometry, tokens, batch)
    return {name: found[name] for name in PARTS}
