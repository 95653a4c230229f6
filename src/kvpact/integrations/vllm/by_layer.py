"""Which attention layers of a model have kvpact's pages, and which spec each stores by."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from kvpact.errors import SpecError
from kvpact.formats import TILE
from kvpact.integrations.vllm.page import PageForm
from kvpact.integrations.vllm.setting import SETTING, codecs
from kvpact.spec import Spec


def give_backends(
    layers: Mapping[str, Any],
    plain: type,
    specs: Sequence[Spec],
    stored: Callable[[type, Spec], type],
    sliding: Callable[[int], type],
) -> None:
    """Give each attention layer of a model that is of the `plain` backend that of its kind.

    `stored`: makes the class of layers that store by a spec; `sliding`: that of layers with a
    sliding window, of the bytes of a token in the largest of the others.
    """
    plains = {
        name: layer
        for name, layer in layers.items()
        if issubclass(getattr(layer, "attn_backend", object), plain)
        and layer.attn_backend.stored is None
    }
    full = {name: layer for name, layer in plains.items() if layer.sliding_window is None}
    most = 0
    for layer, spec in zip(full.values(), specs_of(tuple(full), specs), strict=True):
        layer.attn_backend = stored(layer.attn_backend, spec)
        pair = codecs(spec, layer.head_size, layer.head_size_v, layer.kv_cache_torch_dtype)
        most = max(most, layer.num_kv_heads * PageForm(*pair, TILE).content)
    for name in plains.keys() - full.keys():
        layers[name].attn_backend = sliding(most)


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
            f"{SETTING} names a recipe by layer, and {name!r} is not the name of one of {count} "
            "layers; name one spec for all layers"
        )
    return numbers[0]


def sliding_block(tokens: int, own: int, full: int) -> int:
    """Return the most tokens, whole tiles and a part of `tokens`, whose page is no larger."""
    parts = (n for n in range(TILE, tokens + 1, TILE) if tokens % n == 0)
    return max((n for n in parts if n * own <= tokens * full), default=TILE)
