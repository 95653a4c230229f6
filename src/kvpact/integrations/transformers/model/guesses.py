"""Errors for what is passed in place of a model or an option: they name the line to write."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from difflib import get_close_matches
from os import PathLike
from typing import Any

from torch.nn import Module
from transformers import PreTrainedModel

from kvpact.errors import KVPactError, SpecError
from kvpact.integrations.transformers.versions import PreTrainedConfig
from kvpact.recipe import SpecLike, is_recipe
from kvpact.spec import DEFAULT_SPEC, Spec, free_options, parse_spec

_OPTIONS = (
    "attention",
    "exact_new",
    "backend",
    "check",
    "key_offsets",
    "calibration",
    "k_eq_v",
    "sliding",
    "budget",
    "rungs",
    "context",
)
_SIDES = dict.fromkeys(("k", "key", "k_bits", "key_bits"), 0)
_SIDES |= dict.fromkeys(("v", "value", "v_bits", "value_bits"), 1)
_MEANT = {"q_group_size": "group", "group_size": "group", "residual_length": "window"}
CACHE_MEANT = {
    "compression_ratio": "cache.saved, the share of an exact cache's bytes that is saved",
    "fork": "copy.deepcopy(cache)",
    "from_pretrained": "CompressedCache.load(path, model)",
    "from_snapshot": "CompressedCache.load(path, model)",
    "memory": "cache.nbytes",
    "save_pretrained": "cache.save(path)",
    "summary": "print(cache), or cache.stats()",
    "truncate": "cache.crop(-count), with the number of tokens to remove",
}
"""What to write in the place of names that a `CompressedCache` does not have."""


def config_of(maker: str, model: Any, spec: Any) -> PreTrainedConfig:
    """Return the config of a model, or the one that was passed; `maker` is what was called."""
    config = model if isinstance(model, PreTrainedConfig) else getattr(model, "config", None)
    if isinstance(config, PreTrainedConfig):
        return config
    if isinstance(model, str | PathLike) and hasattr(spec, "config"):
        line = f"{maker}(model, {str(model)!r})"
    elif isinstance(model, str | PathLike | tuple):
        name = "..." if isinstance(model, tuple) else repr(str(model))
        line = f"model, tokenizer = kvpact.load_model({name}); {maker}(model)"
    else:
        name = "pipe.model" if hasattr(model, "model") else "model"
        line = f"{maker}({name}), of a model of transformers or its config"
    raise KVPactError(f"{type(model).__name__} stands where the model should; write: {line}")


def unwrapped(model: Any) -> Any:
    """Return the model of transformers in a pipeline, a PEFT model or a compiled one."""
    while not isinstance(model, PreTrainedModel):
        if hasattr(model, "_orig_mod"):  # first: what is compiled has all other names, too
            model = model._orig_mod
        elif hasattr(model, "get_base_model"):
            model = model.get_base_model()
        elif isinstance(model, Module) or not isinstance(getattr(model, "model", None), Module):
            break
        else:
            model = model.model
    return model


def meant_spec(maker: str, spec: SpecLike | int, named: dict[str, Any]) -> SpecLike:
    """Return a call's spec, with options of its own among `named` ones; these are taken out."""
    if type(spec) is int:
        spec, named["bits"] = DEFAULT_SPEC, spec
    _refuse_sides(maker, {**spec, **named} if isinstance(spec, Mapping) else named)
    free: set[str] = set()
    if named.keys() - set(_OPTIONS) and isinstance(spec, str) and not is_recipe(spec):
        free = free_options(spec) | ({"bits"} if spec == DEFAULT_SPEC else set())
        spec = parse_spec(spec)
    for name in [x for x in named if x not in _OPTIONS]:
        value, option = named.pop(name), "bits" if name == "nbits" else name
        if isinstance(spec, Spec) and option in free:
            free.remove(option)
            spec = spec.with_options(**{option: int(value) if str(value).isdecimal() else value})
            continue
        line = f"it has {', '.join(('spec', 'bits', *_OPTIONS))}"
        if near := get_close_matches(name, _OPTIONS, n=1):
            line = f"did you mean {near[0]}={value!r}?"
        elif name == "device":
            line = f"a cache is where its model is; write: model.to({value!r}); {maker}(model)"
        elif isinstance(value, str):
            line += f"; write: {maker}(model, {(_known(value) or DEFAULT_SPEC)!r})"
        elif text := _known(spec, **{_MEANT.get(name, name): value}):
            line = f"the spec has; write: {maker}(model, {text!r})"
        elif name in _MEANT:
            text = f"int:bits=4,{_MEANT[name]}={value}"
            line = f"specs have {_MEANT[name]}; write: {maker}(model, {text!r})"
        raise SpecError(f"{maker} has no option {name!r}; {line}")
    return spec  # type: ignore[return-value]


def _refuse_sides(maker: str, given: Mapping[Any, Any]) -> None:
    """Raise `SpecError` where K and V have options of their own, and write their spec."""
    sides = ["int:bits=8", "int:bits=4"]
    found = [x for x in given if x in _SIDES and isinstance(given[x], str | int)]
    for name in found:
        text = str(given[name])
        sides[_SIDES[name]] = f"int:bits={text}" if text.isdecimal() else text
    if found:
        line = f"{maker}(model, {'/'.join(sides)!r})"
        raise SpecError(f"one spec has a method for K and one for V, after a slash; write: {line}")


def _known(spec: Any, **options: Any) -> str:
    """Return a spec with these options as text; empty where there is none."""
    with suppress(SpecError):
        return str(parse_spec(spec).with_options(**options))
    return ""
