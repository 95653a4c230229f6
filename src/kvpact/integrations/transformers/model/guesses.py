"""Errors for what is passed in place of a model or an option: they name the line to write."""

from __future__ import annotations

from contextlib import suppress
from difflib import get_close_matches
from os import PathLike
from typing import Any

from kvpact.errors import KVPactError, SpecError
from kvpact.integrations.transformers.versions import PreTrainedConfig
from kvpact.recipe import SpecLike
from kvpact.spec import DEFAULT_SPEC, parse_spec

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
_MEANT = {"q_group_size": "group", "group_size": "group", "residual_length": "window"}


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


def meant_spec(maker: str, spec: SpecLike | int, named: dict[str, Any]) -> SpecLike:
    """Return a call's spec, by its `bits` or `nbits` if it has them; these are taken out."""
    if type(spec) is int:
        spec, named["bits"] = DEFAULT_SPEC, spec
    for name in [x for x in named if x not in _OPTIONS]:
        value = named.pop(name)
        if name in ("bits", "nbits") and spec == DEFAULT_SPEC:
            bits = int(value) if str(value).isdecimal() else value
            spec = parse_spec(DEFAULT_SPEC).with_options(bits=bits)
            continue
        line = f"it has {', '.join(('spec', 'bits', *_OPTIONS))}"
        if near := get_close_matches(name, _OPTIONS, n=1):
            line = f"did you mean {near[0]}={value!r}?"
        elif isinstance(value, str):
            line += f"; write: {maker}(model, {(_known(value) or DEFAULT_SPEC)!r})"
        elif text := _known(spec, **{_MEANT.get(name, name): value}):
            line = f"the spec has; write: {maker}(model, {text!r})"
        elif name in _MEANT:
            text = f"int:bits=4,{_MEANT[name]}={value}"
            line = f"specs have {_MEANT[name]}; write: {maker}(model, {text!r})"
        raise SpecError(f"{maker} has no option {name!r}; {line}")
    return spec  # type: ignore[return-value]


def _known(spec: Any, **options: Any) -> str:
    """Return a spec with these options as text; empty where there is none."""
    with suppress(SpecError):
        return str(parse_spec(spec).with_options(**options))
    return ""
