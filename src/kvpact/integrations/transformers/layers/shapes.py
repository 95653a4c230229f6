"""Shapes of a model's cache, layer by layer, found without the model's weights.

The model is built without memory (`without_memory`) and called once, so the shapes are
those that its own code gives the cache: of latents, of layers that share K and V or have other
heads, of linear attention.
"""

from copy import deepcopy
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache

from kvpact.errors import KVPactError
from kvpact.integrations.layer_shape import LayerShape
from kvpact.integrations.models import first_line, quiet_transformers
from kvpact.integrations.transformers import versions
from kvpact.integrations.transformers.layers.made_keys import attentions_without_values
from kvpact.integrations.transformers.model.facts import COMPRESSED, ENTRIES, layer_facts

_TOKENS = 7  # of the one call; no other axis of a cache is that long
_DTYPE = torch.bfloat16  # some kernels of experts know no other one


def layer_shapes(config: versions.PreTrainedConfig, dtype: torch.dtype) -> list[LayerShape]:
    """Return the shape of the cache of each layer of a model. Raises `KVPactError`."""
    config = deepcopy(config)
    decoder = config.get_text_config(decoder=True)
    build: Any = AutoModelForCausalLM.from_config
    try:
        with quiet_transformers(), torch.no_grad(), versions.without_memory():
            model = build(config, dtype=_DTYPE).eval()
            facts = layer_facts(decoder)
            cache = DynamicCache(config=config)
            ids = torch.zeros(1, _TOKENS, dtype=torch.long, device=model.device)
            model(input_ids=ids, **versions.named(cache), use_cache=True)
    except versions.VersionError:
        raise
    except Exception as error:  # whatever the code of a model raises
        raise KVPactError(
            f"what {type(config).__name__} caches can't be found without weights "
            f"({first_line(error)}); give --layers, --kv-heads and --head-dim in its place"
        ) from error
    configs = versions.configs_by_layer(decoder)[: len(facts.types)]
    parts = zip(facts.types, cache.layers, facts.options, configs, strict=True)
    made = attentions_without_values(model)
    shapes = [_shape(*part, dtype) for part in parts]
    return [x._replace(k_eq_v=x.compressed and i in made) for i, x in enumerate(shapes)]


def _shape(
    kind: str, layer: Any, options: dict[str, Any], config: Any, dtype: torch.dtype
) -> LayerShape:
    held = {name: x for name, x in vars(layer).items() if isinstance(x, Tensor)}
    keys, values = held.pop("keys", None), held.pop("values", None)
    # Some are wider than the model's numbers, whatever those are.
    states = [
        x if x.dtype != _DTYPE else x.to(dtype)
        for name in ("conv_states", "recurrent_states", "overlap_kv", "overlap_gate")
        for x in getattr(layer, name, {}).values()
        if isinstance(x, Tensor)
    ]
    window = options.get("sliding_window")
    shape = LayerShape(
        kind,
        kind in COMPRESSED,
        limit=None if window is None else window - 1,
        state_bytes=sum(x.nbytes for x in states),
        index_width=sum(x.numel() // _TOKENS for x in held.values() if _TOKENS in x.shape),
    )
    if keys is None or values is None:
        return shape
    if kind in ENTRIES:
        buffers = [x for part in (layer.buffer_kv, layer.buffer_gate) for x in part.values()]
        widths = {name: x.shape[2] for name, x in layer.compressed_kv.items()}
        return shape._replace(
            heads=1,
            key_dim=widths["compressor"],
            latent=True,
            limit=layer.sliding_window - 1,
            index_width=widths.get("indexer", 0),
            rate=layer.compress_rate,
            window_width=keys.shape[3],
            buffer_width=sum(x.shape[2] for x in buffers),
        )
    heads, key_dim, value_dim = keys.shape[1], keys.shape[3], values.shape[3]
    mla = heads == 1 and key_dim == getattr(config, "kv_lora_rank", None)
    return shape._replace(heads=heads, key_dim=key_dim, value_dim=value_dim, latent=mla)
