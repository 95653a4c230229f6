"""`enable` and `disable`: the cache of a model's `generate` where a caller names none."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Mapping
from contextlib import AbstractContextManager
from copy import copy, deepcopy
from functools import partial
from typing import Any
from weakref import ref

from transformers import DynamicCache, EncoderDecoderCache, GenerationMixin, PreTrainedModel
from transformers.generation.configuration_utils import GenerationMode

from kvpact.calibration import Calibration
from kvpact.callable_package import tells_names
from kvpact.errors import EnableError
from kvpact.integrations.transformers import versions
from kvpact.integrations.transformers.cache import CompressedCache
from kvpact.integrations.transformers.enabled.served import (
    ServedCalls,
    tell_of_exact,
    watch_no_calls,
)
from kvpact.integrations.transformers.model.facts import layer_facts
from kvpact.integrations.transformers.model.guesses import config_of, meant_spec, unwrapped
from kvpact.recipe import SpecLike, is_recipe, layer_specs, load_recipe
from kvpact.spec import OMITTED, Omitted

PREPARE = "_prepare_cache_for_generation"
"""The method of `generate` that makes a cache where the caller gave none."""
_NO_MATTER = (None, "hybrid", "dynamic")
"""Values of a model's own ``cache_implementation`` without effect, or for what is replaced."""
_BATCHING, _MANAGER = "init_continuous_batching", "_cached_continuous_batching_manager"
_STATE = "__getstate__"
_lock = threading.Lock()


class _Hook:
    """An attribute of a model in front of a method of its class; copied with it, never pickled."""

    def __init__(self, model: PreTrainedModel, name: str) -> None:
        # Weakly, so that a model is freed when its last user drops it, as without the hook.
        self._model, self.name = ref(model), name
        self.own: Any = None

    @property
    def model(self) -> PreTrainedModel:
        """The model that holds the hook."""
        model = self._model()
        if model is None:
            raise EnableError(
                "the model that was enabled is gone, and this is a copy.copy of it: enable the "
                "copy, or disable it; a copy.deepcopy of a model is enabled, too"
            )
        return model

    @property
    def method(self) -> Any:
        """The model's own method, from before."""
        return self.own or partial(getattr(type(self.model), self.name), self.model)

    def install(self) -> None:
        self.own = vars(self.model).get(self.name)
        setattr(self.model, self.name, self)

    def remove(self, model: PreTrainedModel) -> None:
        delattr(model, self.name)
        if self.own is not None:
            setattr(model, self.name, self.own)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        other = memo[id(self)] = object.__new__(type(self))
        # The options are shared: a calibration is as large as a cache.
        changed = {"_model": ref(deepcopy(self.model, memo)), "own": deepcopy(self.own, memo)}
        if isinstance(self, _CacheMaker):
            changed["served"] = ServedCalls()
        vars(other).update(vars(self) | changed)
        return other

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (self.model, self.name)


class _State(dict[str, Any]):
    """The attributes of an enabled model for copies of it; pickled, they lack hooks."""

    def __init__(self, hook: _Hook) -> None:
        super().__init__(hook.method())
        self._hook = self.pop(_STATE)  # a shallow copy is another model, of which it knows nothing

    def __deepcopy__(self, memo: dict[int, Any]) -> dict[str, Any]:
        return deepcopy({**self, _STATE: self._hook}, memo)

    def __reduce__(self) -> tuple[Any, ...]:
        own = {k: x.own if isinstance(x, _Hook) else x for k, x in self.items()}
        own = {k: x for k, x in own.items() if x is not None or self[k] is None}
        own |= {k: copy(x) for k, x in own.items() if k.startswith("_forward_pre_hooks")}
        watch_no_calls(own)
        return dict, (), None, None, iter(own.items())


class _StateMaker(_Hook):
    """A hook that gives the state of a model that is copied or pickled."""

    def __call__(self) -> _State:
        return _State(self)


class _Batching(_Hook):
    """A hook in front of `init_continuous_batching`, whose managers get packed pages."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        versions.check_batching()
        from kvpact.integrations.transformers.enabled.batching import make_manager

        maker, method = vars(self.model)[PREPARE], partial(self.method, *args, **kwargs)
        known, backend = maker.options["calibration"], maker.options.get("backend", "auto")
        return make_manager(self.model, method, maker.layers, known, backend, maker.served)

    def remove(self, model: PreTrainedModel) -> None:
        super().remove(model)
        if hasattr(vars(model).get(_MANAGER), "packed"):
            delattr(model, _MANAGER)  # kept for a next session, which is to have exact pages


class _CacheMaker(_Hook):
    """A hook that replaces the `DynamicCache` a model prepares with a new `CompressedCache`."""

    def __init__(self, model: PreTrainedModel, spec: SpecLike, options: dict[str, Any]) -> None:
        super().__init__(model, PREPARE)
        self.spec, self.given, self.served = spec, options, ServedCalls()
        known = options.get("calibration")
        if known is not None and not isinstance(known, Calibration):
            known = Calibration.load(known)
        self.options = {**options, "calibration": known}
        # One cache is made now, so that its errors and warnings come now.
        layers = len(CompressedCache(model, spec, **self.options).layers)
        self.layers = layer_specs(spec, layers)
        self.ladder = load_recipe(spec).get("ladder") if is_recipe(spec) else None

    def makes_what(self, other: _CacheMaker) -> bool:
        """Return whether the caches are those that another one makes."""
        mine, theirs = self.given, other.given
        return (
            (self.layers, self.ladder) == (other.layers, other.ladder)
            and mine.keys() == theirs.keys()
            and all(
                value is theirs[name] or (isinstance(value, str | bool) and value == theirs[name])
                for name, value in mine.items()
            )
        )

    def __call__(
        self, generation_config: Any, model_kwargs: dict[str, Any], *args: Any, **kwargs: Any
    ) -> Any:
        """Prepare a cache as the model's class does, then replace it in `model_kwargs`."""
        mode = args[0] if args else kwargs.get("generation_mode")
        given = any(model_kwargs.get(name) is not None for name in versions.CACHE_NAMES)
        if given or generation_config.use_cache is False:
            return self.method(generation_config, model_kwargs, *args, **kwargs)
        kind, draft = generation_config.cache_implementation, generation_config.is_assistant
        if kind not in (None, "dynamic") and not (draft and kind == versions.DRAFTS_CACHE):
            raise EnableError(
                f"cache_implementation={kind!r} asks for another cache than the one that `enable` "
                "has set: leave it out, or disable(model) first"
            )
        if mode == GenerationMode.ASSISTED_GENERATION and self.model.config.is_encoder_decoder:
            raise EnableError(
                "assisted generation of an encoder-decoder model rolls back transformers' own "
                "caches only: generate without a draft, or disable(model) first"
            )
        before = set(model_kwargs)
        result = self.method(generation_config, model_kwargs, *args, **kwargs)
        made = model_kwargs.get(versions.CACHE)
        if set(model_kwargs) == before:  # transformers 5.0 leaves it to the model
            made = DynamicCache()
            if self.model.config.is_encoder_decoder:
                made = EncoderDecoderCache(made, DynamicCache())
        cache = self._compressed(made)
        if draft or mode == GenerationMode.ASSISTED_GENERATION:
            versions.expect_crops(cache, draft)
        model_kwargs[versions.CACHE] = cache
        return result

    def _compressed(self, made: Any) -> Any:
        """Return the replacement of a cache that the model's class has made."""
        pair = isinstance(made, EncoderDecoderCache)
        replaced = made.self_attention_cache if pair else made
        if type(replaced) is not DynamicCache:
            raise EnableError(
                f"{type(self.model).__name__} makes {type(replaced).__name__} for its cache, which "
                "`enable` can't replace: disable(model)"
            )
        # Fewer than all where `assistant_early_exit` lets the model's first layers draft.
        count = len(layer_facts(self.model.config.get_text_config(decoder=True)).types)
        recipe: Any = {"default": self.layers[0], "layers": dict(enumerate(self.layers[:count]))}
        recipe = self.spec if isinstance(self.spec, Omitted) else recipe
        if self.ladder is not None:
            recipe["ladder"] = {side: costs[:count] for side, costs in self.ladder.items()}
        options = dict(self.options)
        if isinstance(given := options.get("key_offsets"), Mapping):
            options["key_offsets"] = {x: given[x] for x in given if x < count}
        cache = CompressedCache(self.model, recipe, **options)
        self.served.watch(cache)
        return EncoderDecoderCache(cache, made.cross_attention_cache) if pair else cache


@tells_names(
    {"disable": "kvpact.disable(model)"}
    | dict.fromkeys(
        ("__call__", "config", "device", "eval", "forward", "generate", "to"),
        "enable(model), then go on with the model itself, which is changed",
    )
)
class Enabled(AbstractContextManager["Enabled"]):
    """The result of `enable`: the end of a ``with`` statement undoes what it did.

    Nothing is undone where the model was enabled already: then `changed` is false.
    """

    def __init__(self, model: PreTrainedModel, changed: bool) -> None:
        self.model, self.changed = model, changed

    def __repr__(self) -> str:
        hook = vars(self.model).get(PREPARE)
        state = f"with {hook.spec}" if isinstance(hook, _CacheMaker) else "no longer enabled"
        return f"<{type(self).__name__}: {type(self.model).__name__}, {state}>"

    def stats(self) -> dict[str, Any]:
        """Return what the model's calls of `generate` have taken since it was enabled.

        Returns ``calls``; and of the caches of all calls that are over: ``tokens`` in all rows
        together, ``most_bytes`` that one of them held in the end, ``exact_bytes`` that an exact one
        had held then, ``backends`` that computed, and ``fallbacks``, ``operation: backend`` -> why
        no better backend. A call is over when its cache is freed. All are zero where the model is
        no longer enabled.

        Each request of continuous batching is a call, which is over when its pages are given back
        (one that was evicted counts again), and a pool is a cache that holds what its packed pages
        and windows have at a time.
        """
        hook = vars(self.model).get(PREPARE)
        return (hook.served if isinstance(hook, _CacheMaker) else ServedCalls()).stats()

    def __exit__(self, *error: object) -> None:
        if self.changed:
            disable(self.model)


def enable(model: Any, spec: SpecLike = OMITTED, **options: Any) -> Enabled:
    """Let a model's `generate` use compressed caches wherever its caller passes none.

    Pipelines, servers and all else that calls `model.generate` then have a new `CompressedCache`
    for every call; a caller's own ``cache`` or ``use_cache=False`` stays as it is. Greedy
    search, sampling, beams, assisted generation and padded batches work as with a cache that is
    passed. ``generate(…, return_dict_in_generate=True).cache`` is the cache, with its
    `stats`. A loop that calls the model itself passes a cache itself.

    Attributes of this one model are set, nothing of its class or of transformers; `disable`
    removes them. A ``deepcopy`` of the model is enabled, too. What `save_pretrained` or pickle
    write is the model without them.

    Parameters
    ----------
    model : PreTrainedModel
        The model that generates, or a pipeline, a PEFT model or a compiled one around it.
    spec : str, Spec, path or mapping
        A spec or a recipe, as of `CompressedCache`.
    **options
        More of `CompressedCache`. A calibration is read once, now.

    Returns
    -------
    Enabled
        May be used in a ``with`` statement, whose end disables the model. Nothing happens at its
        end if the model was enabled before with the same spec and options.

    Raises
    ------
    EnableError
        The model generates in a way that takes no such cache, its ``generation_config`` names
        another ``cache_implementation`` than ``"dynamic"``, it is enabled with another spec or
        options, or ``check="deferred"`` is asked for, whose flags nobody would read. A later call
        of `generate` raises it if it names such a ``cache_implementation``; and continuous
        batching (`generate_batch`) where pages can't be packed, or `SpecError` for specs they
        can't hold.
    KVPactError
        Anything else that `CompressedCache` refuses. The model is as before after every error.

    Examples
    --------
    >>> enable(model, "trellis:bits=4")  # doctest: +SKIP
    >>> pipeline("text-generation", model=model, tokenizer=tokenizer)(text)  # doctest: +SKIP
    >>> disable(model)  # doctest: +SKIP
    """
    model = unwrapped(model)
    if not hasattr(model, "forward"):
        config_of("enable", model, spec)
    check_servable(model)
    spec = meant_spec("enable", spec, options)
    if options.get("check") == "deferred":
        raise EnableError(
            "check='deferred' leaves flags that nobody reads after generate: leave it out, or pass "
            f"{versions.CACHE}=CompressedCache(model, ..., check='deferred') and call its verify()"
        )
    maker = _CacheMaker(model, spec, options)
    with _lock:
        _remove_hooks(model, keep=model)  # those of a model that this one was copied from
        current = vars(model).get(PREPARE)
        if isinstance(current, _CacheMaker):
            if not current.makes_what(maker):
                raise EnableError(
                    f"this model is enabled already, with {current.spec!s} and "
                    f"{current.given or 'no options'}: call disable(model) first"
                )
            return Enabled(model, changed=False)
        maker.install()
        _StateMaker(model, _STATE).install()
        model.register_forward_pre_hook(tell_of_exact, with_kwargs=True)
        if hasattr(type(model), _BATCHING):
            _Batching(model, _BATCHING).install()
    return Enabled(model, changed=True)


def disable(model: Any) -> None:
    """Undo `enable`: the model is what it was before. A model that is not enabled stays as it is.

    Calls of `generate` that have begun keep their cache.
    """
    config_of("disable", model := unwrapped(model), "")
    with _lock:
        _remove_hooks(model)


def _remove_hooks(model: PreTrainedModel, keep: PreTrainedModel | None = None) -> None:
    for hook in [x for x in vars(model).values() if isinstance(x, _Hook)]:
        if keep is None or hook._model() is not keep:
            hook.remove(model)
            watch_no_calls(vars(model))


def check_servable(model: Any) -> None:
    """Raise `EnableError` for a model whose `generate` would not use the cache, and say why."""
    kind = type(model)
    name = kind.__name__
    if not issubclass(kind, PreTrainedModel) or not issubclass(kind, GenerationMixin):
        raise EnableError(
            f"enable wants a model of transformers that generates, or what wraps one, not {name}"
        )
    if not model._supports_default_dynamic_cache():
        raise EnableError(
            f"{name} has a cache of its own, which kvpact can't replace: there is nothing to enable"
        )
    prepare = inspect.signature(getattr(kind, PREPARE))
    if not {"generation_config", "model_kwargs"} <= set(prepare.parameters):
        raise EnableError(
            f"{name} makes its cache in a way of its own, which kvpact can't replace: pass "
            f"{versions.CACHE}=CompressedCache(model, ...) where it takes one"
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
    """Return whether `generate` of a class calls `PREPARE`: itself, or by that of a base class."""
    above = model.__mro__[: model.__mro__.index(GenerationMixin)]
    if not any("generate" in vars(cls) for cls in above):
        return True
    codes = [getattr(x, "__code__", None) for cls in above for x in vars(cls).values()]
    names = [set(code.co_names) for code in codes if code is not None]
    return any(PREPARE in known or {"super", "generate"} <= known for known in names)
