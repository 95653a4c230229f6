"""What else is passed for a model or an option: the error names the line to write."""

from __future__ import annotations

from difflib import get_close_matches
from os import PathLike
from typing import Any

from transformers import PreTrainedConfig

from kvpact.errors import KVPactError, SpecError
from kvpact.recipe import SpecLike
from kvpact.spec import DEFAULT_SPEC, parse_spec

_OPTIONS = ("attention", "exact_new", "backend", "check", "key_offsets", "calibration")


def config_of(maker: str, model: Any, spec: Any) -> PreTrainedConfig:
    """Return the config of a model, or the one that was passed; `maker` is what was called."""
    config = model if isinstance(model, PreTrainedConfig) else getattr(model, "config", None)
    if isinstance(config, PreTrainedConfig):
        return config
    if isinstance(model, str | PathLike) and hasattr(spec, "config"):
        line = f"{maker}(model, {str(model)!r})"
    elif isinstance(model, str | PathLike | tuple):
        name = "…" if isinstance(model, tuple) else repr(str(model))
        line = f"model, tokenizer = kvpact.load_model({name}); {maker}(model)"
    else:
        name = "pipe.model" if hasattr(model, "model") else "model"
        line = f"{maker}({name}), of a model of transformers or its config"
    raise KVPactError(f"{type(model).__name__} stands where the model should; write: {line}")


def meant_spec(maker: str, spec: SpecLike, named: dict[str, Any]) -> SpecLike:
    """Return a call's spec, by its `bits` or `nbits` if it has them; these are taken out."""
    for name in [x for x in named if x not in _OPTIONS]:
        value = named.pop(name)
        if name in ("bits", "nbits") and spec == DEFAULT_SPEC:
            spec = parse_spec(DEFAULT_SPEC).with_options(bits=value)
            continue
        line = f"it has {', '.join(('spec', 'bits', *_OPTIONS))}"
        try:
            text = str(parse_spec(spec).with_options(**{name: value}))  # type: ignore[arg-type]
            line = f"the spec has; write: {maker}(model, {text!r})"
        except SpecError:
            if near := get_close_matches(name, _OPTIONS, n=1):
                line = f"did you mean {near[0]}={value!r}?"
        raise SpecError(f"{maker} has no option {name!r}; {line}")
    return spec
