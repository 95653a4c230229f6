"""Facts that a model's config states about its layers, read once."""

import importlib
from collections import Counter
from contextlib import suppress
from typing import Any, NamedTuple
from weakref import ref

import torch.distributed as dist

from kvpact.errors import GeometryError, KVPactError
from kvpact.geometry import CacheGeometry
from kvpact.integrations.transformers import versions

INDEXED = frozenset({"indexed_attention", "minimax_m3_sparse"})
"""Types of layers that choose the tokens they attend to."""
ENTRIES = frozenset({"compressed_sparse_attention", "heavily_compressed_attention"})
"""Types of layers whose model makes entries of tokens itself."""
COMPRESSED = frozenset({"full_attention", "hybrid", *INDEXED, *ENTRIES})
"""Types of layers whose K and V, or entries, are compressed."""
SLIDING = "sliding_attention"
CROSS = "cross_attention"
"""The type of layers that attend to an image alone; transformers has none for them."""
_MASKED = {*COMPRESSED - ENTRIES, "sliding_attention", "chunked_attention", "hybrid_sliding"}
_STATES = {"linear_attention", "conv", "dummy"}
_MEANINGS = {
    "sliding_attention": "the last tokens alone",
    "chunked_attention": "the tokens of a chunk",
    "linear_attention": "a state of fixed size",
    "conv": "a state of fixed size",
    "hybrid_sliding": "the last tokens and a state",
    "dummy": "nothing",
    CROSS: "an image alone",
}


class LayerFacts(NamedTuple):
    """Facts about a model's layers: transformers' types, and the options of their cache layers."""

    types: tuple[str, ...]
    options: tuple[dict[str, Any], ...]
    latent_widths: frozenset[int]  # of latents (MLA), and of entries
    sparse: bool  # some layers may choose what they attend to
    read_again: frozenset[int]  # layers whose K and V later layers read, too

    def compressed(self) -> list[int]:
        """Return the layers whose K and V are compressed. Raises `KVPactError`."""
        found = [layer for layer, kind in enumerate(self.types) if kind in COMPRESSED]
        if not found:
            kinds = Counter(self.types).items()
            there = ", ".join(f"{n} of {x!r} ({_MEANINGS.get(x, 'unknown')})" for x, n in kinds)
            raise KVPactError(
                f"no layer of this model has full attention: it has {there}; there is nothing to "
                "compress"
            )
        return found


def check_heads(config: Any, geometry: CacheGeometry) -> None:
    """Raise `GeometryError` unless a config has such keys, or more heads (tensor parallelism)."""
    facts = layer_facts(config)
    by_layer = zip(versions.configs_by_layer(config), facts.types, strict=False)
    latents = facts.latent_widths or getattr(config, "kv_lora_rank", None)
    layers = [] if latents else [x for x, kind in by_layer if kind == "full_attention"]
    named = [
        {getattr(x, name, None) for x in layers} for name in ("num_key_value_heads", "head_dim")
    ]
    heads, widths = ({x for x in known if type(x) is int} for known in named)
    if dist.is_available() and dist.is_initialized():
        heads |= {count // dist.get_world_size() for count in heads}
    given = geometry.num_kv_heads, geometry.head_dim
    if (heads and given[0] not in heads) or (widths and given[1] not in {0, *widths}):
        raise GeometryError(
            f"the snapshot has {given[0]} KV heads of width {given[1]}, the model's config "
            f"num_key_value_heads {sorted(heads)} and head_dim {sorted(widths)}: it is of another "
            "model"
        )


_known: dict[int, tuple[ref[Any], dict[str, Any], LayerFacts]] = {}


def layer_facts(config: Any) -> LayerFacts:
    """Return a config's facts about its layers; read again only when the config has changed."""
    # Lists may be changed in place; the attention changes with every cache and says nothing here.
    state = {name: tuple(x) if type(x) is list else x for name, x in vars(config).items()}
    state.pop("_attn_implementation_internal", None)
    known = _known.get(id(config))
    if known is not None and known[0]() is config and known[1] == state:
        return known[2]
    types, options = versions.cache_layers(config)
    if not set(types) <= versions.LAYER_CLASSES.keys():  # some are known with the model's code
        with suppress(ImportError):
            importlib.import_module(versions.modeling_module(config))
    for unknown in sorted(set(types) - versions.LAYER_CLASSES.keys()):
        raise KVPactError(f"layer type {unknown!r} is not known to this transformers")
    # Some configs have a value for each layer, and none for all.
    widths = {getattr(layer, "kv_lora_rank", None) for layer in versions.configs_by_layer(config)}
    widths |= set() if ENTRIES.isdisjoint(types) else {config.head_dim}
    sparse = not set(types) <= _MASKED | _STATES
    latent = frozenset(width for width in widths if width and versions.KEEPS_LATENTS)
    for layer in getattr(config, "cross_attention_layers", None) or ():
        types[layer] = CROSS
    facts = LayerFacts(
        tuple(types), tuple(options), latent, sparse, versions.layers_read_again(config)
    )
    key, everyone = id(config), _known  # a module's names are None when an interpreter ends
    _known[key] = ref(config, lambda _: everyone.pop(key, None)), state, facts
    return facts
