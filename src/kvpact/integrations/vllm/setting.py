"""The plug-in's main setting, an environment variable: a spec or the path of a recipe.

Each spec of a recipe has a backend class of its own, and layers with a sliding window have vLLM's.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import torch

from kvpact.errors import BackendUnavailable, SpecError
from kvpact.formats import TILE
from kvpact.geometry import CacheGeometry
from kvpact.integrations.calibrated import learnt_of
from kvpact.integrations.calibrations import learning
from kvpact.integrations.pages.page import PageForm, check_serves, codecs, page_unit
from kvpact.integrations.vllm.calibrated import CALIBRATION, known_of, named, of_rank
from kvpact.integrations.vllm.dtype import as_model
from kvpact.kernels import Compute, Plan, choose
from kvpact.methods import Codec
from kvpact.recipe import layer_specs
from kvpact.spec import DEFAULT_SPEC, Spec

SETTING = "KVPACT_VLLM_SPEC"
DEFAULT, PAGES = "default", f"{DEFAULT_SPEC},sinks=0"
"""A name for the default spec, and what pages hold of it: they have no place for sinks."""
_CPU = torch.device("cpu")


def served() -> str | None:
    """Return the variable's value, a spec or the path of a recipe; None where it is not set."""
    return os.environ.get(SETTING, "").strip() or None


def served_specs(num_layers: int) -> list[Spec]:
    """Return the spec that the pages of each layer of the model are to hold. Raises `SpecError`."""
    text = served()
    if text is None:
        raise SpecError(f"{SETTING} is not set: name a spec or a recipe")
    specs = layer_specs(PAGES if text == DEFAULT else text, num_layers)
    for spec in dict.fromkeys(specs):
        check_serves(spec, SETTING, calibrated=True)
    if (file := named()) is not None and not learning(specs):
        raise SpecError(
            f"{file.name} is set, and {SETTING}={text!r} learns nothing: unset {CALIBRATION}, or "
            f"take {PAGES!r}"
        )
    return specs


def native_plan(
    k: Codec, v: Codec, dtype: torch.dtype, device: torch.device = _CPU, latent: bool = False
) -> Plan:
    """Return the plan of a device: the kernels made for it; on a GPU checks are deferred."""
    on_cpu = device.type == "cpu"
    compute: Compute = choose("cpu") if on_cpu else choose("triton", check="deferred")
    return compute.plan(
        compute.stream(k, device, dtype), compute.stream(v, device, dtype), latent=latent
    )


def refuse(what: str) -> NoReturn:
    """Raise `BackendUnavailable` for a model, or a way of running it, that is not covered."""
    raise BackendUnavailable(
        f"kvpact's vLLM plug-in does not cover {what}; unset {SETTING} to run with vLLM's own cache"
    )


def give_backends(
    layers: Mapping[str, Any],
    plain: type,
    specs: Sequence[Spec],
    stored: Callable[[type, Spec], type],
    sliding: Callable[[int], type],
    dtype: torch.dtype,
) -> list[str]:
    """Replace the `plain` backend class of attention layers; return those that store by a spec.

    `stored`: makes their class; `sliding`: that of the others, of the bytes of the largest token.
    """
    plains = {
        name: layer
        for name, layer in layers.items()
        if issubclass(getattr(layer, "attn_backend", object), plain)
        and layer.attn_backend.stored is None
    }
    for layer in plains.values():
        as_model(layer, dtype)
    full = {name: layer for name, layer in plains.items() if layer.sliding_window is None}
    most = 0
    for layer, spec in zip(full.values(), specs_of(tuple(full), specs), strict=True):
        layer.attn_backend = stored(layer.attn_backend, spec)
        pair = codecs(spec, layer.head_size, layer.head_size_v, layer.kv_cache_torch_dtype)
        most = max(most, layer.num_kv_heads * PageForm(*pair, page_unit(*pair)).content)
    for name in plains.keys() - full.keys():
        layers[name].attn_backend = sliding(most)
    return list(full)


def hand_over(layers: Mapping[str, Any], names: Sequence[str], config: Any) -> None:
    """Give attention layers of vLLM, by name, what their codecs learnt, from its configuration."""
    model, parallel = config.model_config, config.parallel_config
    total, heads = model.get_total_num_hidden_layers(), model.get_total_num_kv_heads()
    if (known := known_of(model, served_specs(total))) is None:
        return
    ranks, rank = parallel.tensor_parallel_size, parallel.rank % parallel.tensor_parallel_size
    for name in names:
        layer = layers[name]
        shape = heads, layer.head_size, layer.head_size_v, layer.kv_cache_torch_dtype
        of = CacheGeometry(1, *shape)
        spec, number = layer.attn_backend.stored, layer_number(name, total)
        (learnt,) = learnt_of(known, (number,), (spec,), of, total)
        layer.impl.learnt = of_rank(learnt, layer.num_kv_heads, rank, ranks)


def specs_of(names: Sequence[str], specs: Sequence[Spec]) -> tuple[Spec, ...]:
    """Return the specs of some layers, by their names; `specs` are those of the whole model."""
    if len(set(specs)) == 1:
        return (specs[0],) * len(names)
    return tuple(specs[layer_number(name, len(specs))] for name in names)


def layer_number(name: str, count: int) -> int:
    """Return the number of a layer, from a name such as ``model.layers.3.self_attn.attn``."""
    numbers = [int(part) for part in name.split(".") if part.isdecimal()]
    if len(numbers) != 1 or numbers[0] >= count:
        raise SpecError(
            f"{name!r} is not the name of one of {count} layers, which a recipe and {CALIBRATION} "
            "tell apart by their numbers; name one spec for all layers, which learns nothing"
        )
    return numbers[0]


def sliding_block(tokens: int, own: int, full: int) -> int:
    """Return the most tokens, whole tiles and a part of `tokens`, whose page is no larger."""
    parts = (n for n in range(TILE, tokens + 1, TILE) if tokens % n == 0)
    return max((n for n in parts if n * own <= tokens * full), default=TILE)
