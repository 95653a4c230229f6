"""Whether a model's `generate` takes the cache that `enable` makes for it."""

from __future__ import annotations

import inspect
from typing import Any

from transformers import GenerationMixin, PreTrainedModel
from transformers.generation.utils import ALL_CACHE_NAMES

from kvpact.errors import EnableError

CACHE_NAMES = tuple(ALL_CACHE_NAMES)
"""The names under which models of transformers take a cache."""
PREPARE = "_prepare_cache_for_generation"
"""The method of `generate` that makes a cache where the caller gave none."""
_NO_MATTER = (None, "hybrid")
"""Values of a model's own ``cache_implementation`` without effect."""


def check_servable(model: Any) -> None:
    """Raise `EnableError` for a model whose `generate` would not use the cache, and say why."""
    kind = type(model)
    name = kind.__name__
    if not issubclass(kind, PreTrainedModel) or not issubclass(kind, GenerationMixin):
        raise EnableError(
            f"enable wants a model of transformers that generates, not {name}: of a PEFT model "
            "model.get_base_model(), of a compiled one the model that was compiled"
        )
    if not model._supports_default_dynamic_cache():
        raise EnableError(
            f"{name} has a cache of its own, which kvpact can't replace: there is nothing to enable"
        )
    prepare = inspect.signature(getattr(kind, PREPARE))
    if not {"generation_config", "model_kwargs"} <= set(prepare.parameters):
        raise EnableError(
            f"{name} makes its cache in a way of its own, which kvpact can't replace: pass "
            "past_key_values=CompressedCache(model, …) where it takes one"
        )
    if not _prepares(kind):
        parts = [
            part for part, module in model.named_children() if isinstance(module, GenerationMixin)
        ]
        raise EnableError(
            f"generate of {name} leaves the work to a part of it: enable that part"
            + (f" ({', '.join(f'model.{part}' for part in parts)})" if parts else "")
        )
    named = getattr(model.generation_config, "cache_implementation", None)
    if named not in _NO_MATTER:
        raise EnableError(
            f"the generation_config of this model names cache_implementation={named!r}: set "
            "model.generation_config.cache_implementation = None first"
        )


def _prepares(model: type) -> bool:
    """Whether `generate` of a class comes to `PREPARE`: by itself, or by that of a base class."""
    above = model.__mro__[: model.__mro__.index(GenerationMixin)]
    if not any("generate" in vars(cls) for cls in above):
        return True
    codes = [getattr(x, "__code__", None) for cls in above for x in vars(cls).values()]
    names = [set(code.co_names) for code in codes if code is not None]
    return any(PREPARE in known or {"super", "generate"} <= known for known in names)
