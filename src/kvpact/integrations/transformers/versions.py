"""How this transformers is called: the one place that asks what it is like.

All else imports the engine's names from here and speaks as its newest version does. What can be
asked by its form, a signature or an attribute, is; what a version lacks is refused by the name of
the one that has it.
"""

from __future__ import annotations

from collections.abc import Mapping
from inspect import signature
from typing import TYPE_CHECKING, Any

import transformers
from torch import Tensor
from transformers import Cache, cache_utils
from transformers.cache_utils import CacheLayerMixin, DynamicLayer, DynamicSlidingWindowLayer
from transformers.generation import utils as _generation

from kvpact.errors import KVPactError

if TYPE_CHECKING:
    from transformers import PreTrainedConfig as PreTrainedConfig
    from transformers.cache_utils import (
        LinearAttentionCacheLayerMixin as LinearAttentionCacheLayerMixin,
    )
    from transformers.cache_utils import LinearAttentionLayer as LinearAttentionLayer
else:
    PreTrainedConfig = getattr(transformers, "PreTrainedConfig", None)
    PreTrainedConfig = PreTrainedConfig or transformers.PretrainedConfig  # before 5.0
    # Before 5.15 such layers hold their states otherwise, and none is made (`cache_layers`).
    _HAS_STATES = hasattr(cache_utils, "DYNAMIC_LAYER_TYPE_MAPPING")
    LinearAttentionCacheLayerMixin = (
        cache_utils.LinearAttentionCacheLayerMixin if _HAS_STATES else type("NoStates", (), {})
    )
    LinearAttentionLayer = (
        cache_utils.LinearAttentionLayer if _HAS_STATES else LinearAttentionCacheLayerMixin
    )

_NAMES = ("cache", "past_key_values")
_PLAIN = {
    "full_attention": DynamicLayer,
    "sliding_attention": DynamicSlidingWindowLayer,
    "chunked_attention": DynamicSlidingWindowLayer,
}
LAYER_CLASSES: Mapping[str, type] = getattr(cache_utils, "DYNAMIC_LAYER_TYPE_MAPPING", _PLAIN)
"""The class of cache layers for each type of layer; models' own ones are added to it."""
_OPTIONS = {
    "sliding_attention": ("sliding_window",),
    "chunked_attention": ("sliding_window",),
    "hybrid_sliding": ("sliding_window", "number_of_states"),
    "hybrid": ("number_of_states",),
    "linear_attention": ("number_of_states",),
    "conv": ("number_of_states",),
    "compressed_sparse_attention": ("config",),
    "heavily_compressed_attention": ("config",),
}
CACHE_NAMES: tuple[str, ...] = tuple(
    dict.fromkeys([*_NAMES, *getattr(_generation, "ALL_CACHE_NAMES", ())])
)
"""Names under which `generate` keeps a cache."""
CACHE = "cache" if "cache" in getattr(_generation, "ALL_CACHE_NAMES", ()) else "past_key_values"
"""The argument of models and `generate` that takes a cache; from 5.24 on ``cache``."""
_TO_LENGTH = "tokens_to_remove" not in signature(Cache.crop).parameters


def named(cache: Any) -> dict[str, Any]:
    """Return a cache as the argument of a model or of `generate`."""
    return {CACHE: cache}


def given_cache(arguments: Mapping[str, Any]) -> Any:
    """Return the cache among a call's arguments, by whichever name; None where there is none."""
    return next((x for name in _NAMES if (x := arguments.get(name)) is not None), None)


def cache_of(output: Any) -> Any:
    """Return the cache in what a model or `generate` returned."""
    return getattr(output, CACHE, None)


def needs(version: str, what: str) -> KVPactError:
    """Return an error that says from which version of transformers on there is something."""
    return KVPactError(
        f"{what} from transformers {version} on; this is {transformers.__version__}: "
        f"pip install 'transformers>={version}'"
    )


def configs_by_layer(config: PreTrainedConfig) -> list[Any]:
    """Return each layer's config: from 5.19 on some models' layers have values of their own."""
    own = getattr(config, "per_layer_config", None)
    return [config] * config.num_hidden_layers if own is None else list(own)


def cache_layers(config: PreTrainedConfig) -> tuple[list[str], list[dict[str, Any]]]:
    """Return the type of each cache layer of a decoder, and the options of its class.

    Raises `KVPactError` for a type that only newer versions keep in a cache of theirs.
    """
    ask = getattr(cache_utils, "get_layer_types_and_kwargs", None)
    types, options = _asked(config) if ask is None else ask(config)
    if not isinstance(options, dict):  # from 5.19 on for each layer
        return list(types), list(options)
    return list(types), [{x: options[x] for x in _OPTIONS.get(kind, ())} for kind in types]


def _asked(config: Any) -> tuple[list[str], dict[str, Any]]:
    """Return what `get_layer_types_and_kwargs` would, before 5.15, as `DynamicCache` finds it."""
    window, chunk = (
        getattr(config, name, None) for name in ("sliding_window", "attention_chunk_size")
    )
    kind = "sliding_attention" if window else "chunked_attention" if chunk else "full_attention"
    types = getattr(config, "layer_types", None) or [kind] * config.num_hidden_layers
    other = set(types) - _PLAIN.keys()
    other |= {"shared K and V"} if getattr(config, "num_kv_shared_layers", None) else set()
    if other:
        raise needs("5.15", f"kvpact caches layers with {', '.join(sorted(other))}")
    return types, {"sliding_window": window or chunk}


def new_tokens(given: int | Tensor) -> int:
    """Return how many tokens a call brings; before 5.4 transformers gives their positions."""
    return given if isinstance(given, int) else given.shape[0]


def tokens_to_remove(given: int, length: int) -> int:
    """Return how many of `length` tokens `crop` is to forget, as a negative number.

    Before 5.15 transformers names the length that is left, or a negative number, too.
    Raises `ValueError` for another one.
    """
    if _TO_LENGTH:
        return given if given < 0 else min(given - length, 0)
    if given > 0:
        raise ValueError(f"crop takes a negative number of tokens to remove, not {given}")
    return given


def expect_crops(cache: Cache, draft: bool) -> None:
    """Make ready for rollbacks: a draft's windows let go of nothing until the next one.

    Raises `KVPactError` where this transformers has no such windows; the target's it makes itself.
    """
    if hasattr(Cache, "activate_past_recording"):
        if draft:
            cache.activate_past_recording()  # type: ignore[no-untyped-call]
    elif any(cache.is_sliding):
        raise needs("5.15", "drafts of models with sliding attention can be rolled back")


class CacheLayer(CacheLayerMixin):  # type: ignore[no-untyped-call]
    """transformers' class of cache layers, in the words of its newest version."""

    def get_max_cache_shape(self) -> int:
        """Return what `get_max_length` does, for versions before 5.15."""
        return self.get_max_length()
