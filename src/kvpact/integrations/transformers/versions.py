"""Names and signatures of the installed transformers, asked for in this one place.

All else imports the engine's names from here and speaks as its newest version does. What can be
asked by its form, a signature or an attribute, is; what a version lacks is refused by the name of
the one that has it.
"""

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from importlib import import_module
from importlib.util import find_spec
from inspect import signature, unwrap
from types import FunctionType
from typing import TYPE_CHECKING, Any

import torch
import transformers
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import Cache, cache_utils
from transformers.cache_utils import CacheLayerMixin, DynamicLayer, DynamicSlidingWindowLayer
from transformers.generation import utils as _generation
from transformers.utils import generic, logging

from kvpact.errors import EnableError, KVPactError

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
    _states = cache_utils if hasattr(cache_utils, "DYNAMIC_LAYER_TYPE_MAPPING") else None
    LinearAttentionCacheLayerMixin = getattr(
        _states, "LinearAttentionCacheLayerMixin", type("NoStates", (), {})
    )
    LinearAttentionLayer = getattr(_states, "LinearAttentionLayer", LinearAttentionCacheLayerMixin)

KEEPS_LATENTS = hasattr(cache_utils, "DYNAMIC_LAYER_TYPE_MAPPING")
"""True if models with latents (MLA) cache these; before 5.15 they cache K and V made of them."""
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
}
_HAS_POSITIONS = hasattr(
    getattr(cache_utils, "DynamicIndexedLayer", object)(), "indexer_position_ids"
)
_LATER = {
    "compressed_sparse_attention",
    "deepseek_sparse_attention",
    "heavily_compressed_attention",
    "minimax_m3_sparse",
}
"""Types whose layers were called and reset otherwise before 5.19."""
CACHE_NAMES: tuple[str, ...] = tuple(
    dict.fromkeys([*_NAMES, *getattr(_generation, "ALL_CACHE_NAMES", ())])
)
"""Names under which `generate` keeps a cache."""
CACHE = "cache" if "cache" in getattr(_generation, "ALL_CACHE_NAMES", ()) else "past_key_values"
"""The argument of models and `generate` that takes a cache; from 5.24 on ``cache``."""
DRAFTS_CACHE = "dynamic_full"
"""The ``cache_implementation`` that a draft's `generate` is asked for before 5.15."""


def named(cache: Any) -> dict[str, Any]:
    """Return a cache as the argument of a model or of `generate`."""
    return {CACHE: cache}


def given_cache(arguments: Mapping[str, Any]) -> Any:
    """Return the cache among a call's arguments, by whichever name; None where there is none."""
    return next((x for name in _NAMES if (x := arguments.get(name)) is not None), None)


def cache_of(output: Any) -> Any:
    """Return the cache in the output of a model or of `generate`."""
    return getattr(output, CACHE, None)


class VersionError(KVPactError):
    """The transformers that is installed lacks something, which another version has."""

    def __init__(self, what: str, version: str) -> None:
        self.version = version
        super().__init__(
            f"{what} from transformers {version} on; this is {transformers.__version__}: "
            f"pip install 'transformers>={version}'"
        )


def configs_by_layer(config: PreTrainedConfig) -> list[Any]:
    """Return each layer's config: from 5.19 on some models' layers have values of their own."""
    own = getattr(config, "per_layer_config", None)
    return [config] * config.num_hidden_layers if own is None else list(own)


def cache_layers(config: PreTrainedConfig) -> tuple[list[str], list[dict[str, Any]]]:
    """Return types and options of a decoder's cache layers; `VersionError` for newer ones."""
    ask = getattr(cache_utils, "get_layer_types_and_kwargs", None)
    types, options = _asked(config) if ask is None else ask(config)
    if not isinstance(options, dict):  # from 5.19 on for each layer
        if "indexed_attention" in types and "qwen4" in config.model_type and not _HAS_POSITIONS:
            raise VersionError("kvpact caches the index of Qwen4", "5.21")
        return list(types), list(options)
    if later := sorted(_LATER & set(types)):
        raise VersionError(f"kvpact caches layers with {', '.join(later)}", "5.19")
    return list(types), [{x: options[x] for x in _OPTIONS.get(kind, ())} for kind in types]


def _asked(config: Any) -> tuple[list[str], dict[str, Any]]:
    """Return the types and options of layers before 5.15, as `DynamicCache` finds them."""
    window, chunk = (
        getattr(config, name, None) for name in ("sliding_window", "attention_chunk_size")
    )
    kind = "sliding_attention" if window else "chunked_attention" if chunk else "full_attention"
    types = getattr(config, "layer_types", None) or [kind] * config.num_hidden_layers
    other = set(types) - _PLAIN.keys()
    other |= {"shared K and V"} if getattr(config, "num_kv_shared_layers", None) else set()
    other |= {"an index"} if getattr(config, "index_topk", None) else set()
    code: dict[str, Any] = {}
    with suppress(ImportError):  # a config of one's own
        code = vars(import_module(modeling_module(config)))
    other |= {name for name, x in code.items() if name.endswith("Cache") and _is_own(x, config)}
    if other:
        raise VersionError(f"kvpact caches layers with {', '.join(sorted(other))}", "5.15")
    return types, {"sliding_window": window or chunk}


def modeling_module(config: Any) -> str:
    """Return the name of the module that has the code of a config's model."""
    return type(config).__module__.replace(".configuration_", ".modeling_")


def _is_own(found: Any, config: Any) -> bool:
    """Return whether a class of caches is a model's own."""
    return isinstance(found, type) and found.__module__ == modeling_module(config)


def drops_cache_at(config: Any) -> int | None:
    """Return the tokens beyond which `generate` drops a cache that holds fewer (Phi-3); or None."""
    name = "original_max_position_embeddings"
    limit = getattr(config, name, None)
    code = vars(import_module(modeling_module(config))) if isinstance(limit, int) else {}
    found = [vars(x).get("prepare_inputs_for_generation") for x in code.values() if type(x) is type]
    codes = [getattr(unwrap(x), "__code__", None) for x in found if x is not None]
    return limit if any(name in x.co_names for x in codes if x is not None) else None


def has_encoder(kind: type) -> bool:
    """Return whether a class of configs is of models with an encoder, whatever one config says."""
    found = getattr(kind, "is_encoder_decoder", None)
    if found is None:  # before 5.2
        given = signature(kind).parameters.get("is_encoder_decoder")
        found = given is not None and given.default
    return found is True


def check_batching() -> None:
    """Raise `VersionError` where the pools of continuous batching are not of bytes."""
    folder = "transformers.generation.continuous_batching"
    known = find_spec(folder) and find_spec(f"{folder}.cache_allocators")
    # 5.18's get K and V head by head; those since name the type of their layers.
    full = known and import_module(f"{folder}.cache_allocators").FullAttentionCacheAllocator
    if not hasattr(full, "layer_type"):
        raise VersionError("kvpact packs the pages of continuous batching", "5.19")


def rebound(function: Any, **names: Any) -> Any:
    """Return a copy of a function to which names of its module are others; or `EnableError`."""
    if lacks := sorted(names.keys() - {*function.__code__.co_names}):
        raise EnableError(
            f"{function.__qualname__} of transformers {transformers.__version__} has no "
            f"{', '.join(lacks)}, by which kvpact packs pages: disable(model), or another version"
        )
    known = {**function.__globals__, **names}
    code = function.__code__, known, function.__name__, function.__defaults__, function.__closure__
    made = FunctionType(*code)
    made.__kwdefaults__ = function.__kwdefaults__
    return made


def check_index() -> None:
    """Raise `VersionError` where transformers passes an index's choice to attention wrongly."""
    if "indexed_attention" not in LAYER_CLASSES:
        raise VersionError("'kvpact' attends to what an index chose", "5.19")


def without_memory() -> AbstractContextManager[Any]:
    """Let models be made of tensors without numbers, and be called."""
    try:
        with generic.maybe_autocast(device_type="meta", enabled=False):
            return torch.device("meta")
    except (AttributeError, RuntimeError):  # up to 5.0 rotations end on the meta device
        return FakeTensorMode()


@contextmanager
def without_bars() -> Iterator[None]:
    """Hold back the bars of weights that are loaded, and not those of downloads; from 5.2 on."""
    hook = getattr(logging, "set_tqdm_hook", None)
    if hook is None:
        yield
        return
    before = hook(lambda bar, args, kwargs: bar(*args, **{**kwargs, "disable": True}))
    try:
        yield
    finally:
        hook(before)


def layers_read_again(config: Any) -> frozenset[int]:
    """Return the layers whose K and V later ones, which have none of their own, read, too."""
    modes = getattr(config, "kv_sharing_modes", None)
    if modes is not None:
        return frozenset(i for i, x in enumerate(modes) if x == "store" and "reuse" in modes)
    shared = getattr(config, "num_kv_shared_layers", None) or 0  # before 5.23
    kinds = list(getattr(config, "layer_types", None) or [])
    own = kinds[: len(kinds) - shared]
    read = set(kinds[len(own) :]) & set(own)
    return frozenset(len(own) - 1 - own[::-1].index(kind) for kind in read)


def new_tokens(given: int | Tensor) -> int:
    """Return how many tokens a call brings; before 5.4 transformers gives their positions."""
    return given if isinstance(given, int) else given.shape[0]


def crops_to_length() -> bool:
    """Return whether `crop` takes the length that is left, as before 5.15."""
    return "tokens_to_remove" not in signature(Cache.crop).parameters


def tokens_to_remove(given: int | Tensor, length: int) -> int:
    """Return how many of `length` tokens `crop` is to forget, negative; or `ValueError`."""
    given = int(given)  # before 5.19 transformers gives a tensor
    if crops_to_length():  # the length that is left, or a negative number, too
        return given if given < 0 else min(given - length, 0)
    if given > 0:
        line = f"; to keep {given}, write: crop({given - length})" if given < length else ""
        raise ValueError(f"crop takes a negative number of tokens to remove, not {given}{line}")
    return given


def expect_crops(cache: Cache, draft: bool) -> None:
    """Let a draft's windows keep all tokens until a rollback; `VersionError` if there are none."""
    if hasattr(Cache, "activate_past_recording"):
        if draft:
            cache.activate_past_recording()  # type: ignore[no-untyped-call]
    elif any(cache.is_sliding):
        raise VersionError("models with sliding attention work with a draft", "5.15")


def forget(layer: Any) -> None:
    """Let one of transformers' layers forget its tokens; before 5.19 `reset` made them zeros."""
    if isinstance(layer, DynamicLayer):
        layer.keys = layer.values = None
        layer.is_initialized = False
    layer.reset()


class TransformersLayer(CacheLayerMixin):  # type: ignore[no-untyped-call]
    """The base class of transformers' cache layers, in the words of its newest version."""

    def get_max_cache_shape(self) -> int:
        """Return `get_max_length()` under its name before 5.15."""
        return self.get_max_length()
