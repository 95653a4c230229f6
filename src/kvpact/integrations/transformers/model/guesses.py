"""Errors for wrong objects in place of a model or an option; they name the line to write."""

import re
from collections.abc import Mapping
from contextlib import suppress
from difflib import get_close_matches
from os import PathLike
from typing import Any

from torch.nn import Module
from transformers import Cache, PreTrainedModel

from kvpact.errors import KVPactError, SpecError
from kvpact.integrations.transformers.versions import PreTrainedConfig
from kvpact.recipe import SpecLike, is_recipe
from kvpact.registry import known_names
from kvpact.spec import DEFAULT_SPEC, EXACT, Spec, free_options, is_spec, parse_spec

_OPTIONS = (
    *("attention", "exact_new", "backend", "check", "key_offsets", "calibration", "k_eq_v"),
    *("sliding", "budget", "rungs", "context"),
)
_SIDES = {
    pattern.format(side): index
    for index, sides in enumerate((("k", "key"), ("v", "value")))
    for side in sides
    for pattern in ("{}", "{}_bits", "{}_dtype", "cache_type_{}", "type_{}", "{}_cache_dtype")
}
_MEANT = {
    **dict.fromkeys(("group_size", "q_group_size"), "group"),
    **dict.fromkeys(("num_sink_tokens", "num_sinks", "sink_size", "sink_tokens"), "sinks"),
    **dict.fromkeys(("recent_size", "residual_length", "window_length", "window_size"), "window"),
}
_LINES = {
    "cache = CompressedCache(model), and run the prompt with it: a DynamicCache can't be taken "
    "over, nor made": "from_cache from_dynamic from_dynamic_cache from_legacy_cache "
    "to_dynamic to_dynamic_cache",
    "cache = CompressedCache(model), without `with`: `del cache` frees it": "__enter__",
    "cache.crop(-count), with the number of tokens to remove": "truncate",
    "cache.get_seq_length()": "get_length get_usable_length length n_tokens num_tokens seen_tokens "
    "seq_len",
    "cache.layers[0].keys, and .values": "decompress dequantize key_cache keys kv to_tensors "
    "value_cache values",
    "cache.nbytes": "bytes get_memory_footprint memory num_bytes numel size sizes total_bytes",
    "cache.reset()": "clear empty flush",
    "cache.save(path)": "dump export save_pretrained state_dict to_disk to_legacy_cache write",
    "cache.saved, the share that is saved": "compression_ratio nbytes_saved ratio savings",
    "cache.spec": "group method sinks specs window",
    "cache.stats()['bits_per_value']": "bits bits_per_value",
    "copy.deepcopy(cache)": "clone copy detach duplicate fork",
    "CompressedCache.load(path, model)": "from_file from_pretrained from_snapshot load_state_dict",
    "model.generate(**inputs, cache=cache)": "append compress forward generate quantize",
    "model.to(...): a cache is as its model is": "cpu cuda device dtype to",
    "print(cache), or cache.stats()": "describe get_stats info metrics report statistics summary",
}
CACHE_MEANT = {name: line for line, names in _LINES.items() for name in names.split()}
"""Replacements of names that a `CompressedCache` does not have."""
_OPTION_LINES = {
    "a cache is where its model is; write: model.to({value!r}); {maker}(model)": "device",
    "a cache stays with its model: leave it out": "offload offloading",
    "a recipe has specs by layer; write: {maker}(model, {{'default': 'trellis:bits=4', 'layers': "
    "{{0: 'none'}}}})": "exact_layers layers kv_cache_dtype_skip_layers skip_layers",
    "all tokens are kept, in fewer bits; write: {maker}(model, bits=3)": "compression_ratio",
    "as HQQ does write: {maker}(model, 'int:bits=4,group=64')": "axis_key axis_value",
    "kvpact uses torch's threads; write: torch.set_num_threads({value!r})": "n_threads num_threads "
    "threads",
    "pages are held by PagedKVCache(spec, geometry, num_pages); a batch of its sequences is kvpact."
    "integrations.transformers.PagedBatch(model.config, cache)": "block_size num_pages page_size "
    "paged",
    "the cache grows as needed, leave it out; for a limit in bytes write: {maker}(model, budget="
    "'200MB')": "batch_size max_batch_size max_cache_len max_length max_model_len max_seq_len "
    "max_tokens n_ctx num_tokens",
    "the model's dtype is the cache's: leave it out": "compute_dtype dtype torch_dtype",
    "write: kvpact.integrations.transformers.prefix_cache(store, model, cache)": "prefix_cache "
    "enable_prefix_caching prefix_caching",
}
_ELSEWHERE = {name: line for line, names in _OPTION_LINES.items() for name in names.split()}
"""Replacements of other libraries' options, to stand after the name of the option."""


def config_of(maker: str, model: Any, spec: Any) -> PreTrainedConfig:
    """Return the config of a model, or the one that was passed; `maker` is what was called."""
    config = model if isinstance(model, PreTrainedConfig) else getattr(model, "config", None)
    if isinstance(config, PreTrainedConfig):
        marks = [vars(x).get("is_causal") for x in _modules_of_encoder(model, config)]
        if False in marks and True not in marks:
            raise KVPactError(
                f"{type(model).__name__} reads all tokens at once, without a cache; write: "
                f"{maker}(model), of a model that generates text"
            )
        return config
    owner = getattr(spec, "config", spec)
    if isinstance(model, str | PathLike) and isinstance(owner, PreTrainedConfig):
        line = f"{maker}(model, {str(model)!r})"
    elif isinstance(model, str) and is_spec(model):
        line = f"{maker}(model, {model!r})"
    elif isinstance(model, str | PathLike | tuple):
        name = "..." if isinstance(model, tuple) else repr(str(model))
        line = f"model, tokenizer = kvpact.load_model({name}); {maker}(model)"
    else:
        parts = ("model", "module")
        around = next((x for x in parts if isinstance(getattr(model, x, 0), Module)), "")
        name = {"model": "pipe.model", "module": "model.module"}.get(around, "model")
        line = f"{maker}({name}), of a model of transformers or its config"
    raise KVPactError(f"{type(model).__name__} stands where the model should; write: {line}")


def _modules_of_encoder(model: Any, config: Any) -> list[Module]:
    """Return the modules of a model that may be an encoder; a config alone does not tell."""
    encoder = getattr(config, "is_decoder", None) is False and isinstance(model, Module)
    return list(model.modules()) if encoder and not config.is_encoder_decoder else []


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
    spec = getattr(spec, "chosen", spec)  # of a recommendation
    if isinstance(spec, Cache):
        raise SpecError(
            f"a {type(spec).__name__} can't be taken over; write: cache = {maker}(model), and run "
            "the prompt with it"
        )
    if type(spec) is int:
        spec, named["bits"] = DEFAULT_SPEC, spec
    _refuse_sides(maker, spec, {**spec, **named} if isinstance(spec, Mapping) else named)
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
        if name in _ELSEWHERE:
            line = _ELSEWHERE[name].format(maker=maker, value=value)
        elif near := get_close_matches(name, _OPTIONS, n=1):
            line = f"did you mean {near[0]}={value!r}?"
        elif isinstance(value, str) and (text := _known(value)):
            line += f"; write: {maker}(model, {text!r})"
        elif text := _known(spec, **{_MEANT.get(name, name): value}):
            line = f"the spec has; write: {maker}(model, {text!r})"
        elif name in _MEANT:
            text = f"int:bits=4,{_MEANT[name]}={value}"
            line = f"specs have {_MEANT[name]}; write: {maker}(model, {text!r})"
        raise SpecError(f"{maker} has no option {name!r}; {line}")
    return spec  # type: ignore[return-value]


def _refuse_sides(maker: str, spec: Any, given: Mapping[Any, Any]) -> None:
    """Raise `SpecError` where K and V have options of their own, and write their spec."""
    found = [x for x in given if x in _SIDES and isinstance(given[x], str | int)]
    if not found:
        return
    # Of llama.cpp, whose types these are, a side without one is exact.
    exact = any("type" in str(name) for name in found) or isinstance(spec, Mapping)
    sides, unknown = ["none" if exact else _known(spec).partition("/")[0] or DEFAULT_SPEC] * 2, ""
    for name in found:
        text = str(given[name])
        text = f"int:bits={text}" if text.isdecimal() else text
        text = "none" if EXACT.fullmatch(text) else text
        if not _known(text):
            near = get_close_matches(text, known_names(), n=1)
            unknown += f"unknown method {text!r}; "
            text = near[0] if near else f"int:bits={(re.findall('[2-8]', text) or [4])[0]}"
        sides[_SIDES[name]] = text
    line = f"{maker}(model, {'/'.join(sides)!r})"
    raise SpecError(
        f"{unknown}one spec has a method for K and one for V, after a slash; write: {line}"
    )


def _known(spec: Any, **options: Any) -> str:
    """Return a spec with these options as text; empty where there is none."""
    with suppress(SpecError):
        return str(parse_spec(spec).with_options(**options))
    return ""
