"""Key offsets of transformers' models, read from their weights."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor
from torch.nn import Parameter

from kvpact.cache import check_layer
from kvpact.errors import DtypeError, SpecError
from kvpact.integrations.transformers.fallback import say_once
from kvpact.integrations.transformers.versions import PreTrainedConfig
from kvpact.key_offset import DTYPES, LEAVE, KeyOffset, Layout

_BY_LENGTH = ("dynamic", "longrope", "su")
"""Kinds of RoPE whose frequencies depend on how long the whole text is."""
_KEY_NORMS = ("k_norm", "k_layernorm", "key_layernorm", "k_ln")
LEFT = 0.25
"""What may stay of a bias, as a share of the size of what the weights add to it."""
LARGE = 4.0
"""A bias so many times as large as a vector of ones is worth a warning."""


class _Projection(NamedTuple):
    """Keys before the rotation are `weight x + bias`: `[H, D, hidden]` or None, and `[H, D]`."""

    weight: Tensor | None
    bias: Tensor
    dtype: torch.dtype


_Places = list[tuple[ref[Any], ...]]
_known: WeakKeyDictionary[Any, tuple[_Places, list[object], dict[int, KeyOffset]]]
_known = WeakKeyDictionary()


def entries(config: dict[Any, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the names and values in a config's data and in all that is inside it."""
    for name, value in config.items():
        if isinstance(value, dict):
            yield from entries(value)
        else:
            yield str(name), value


def rope_by_length(config: dict[str, Any]) -> str:
    """Return the type of RoPE in a config's data if it turns tokens otherwise in longer texts."""
    types = [value for name, value in entries(config) if name in ("rope_type", "type")]
    return next((value for value in types if value in _BY_LENGTH), "")


def key_offsets(model: Any) -> dict[int, KeyOffset]:
    """Return what a model's keys have by their positions alone, by layer.

    Keys are `R_t (W x + b)`. The bias `b` of the key projection, and of the normalisation before
    it, is taken where it is larger than what `W x` is expected to be; its largest pairs of channels
    are, until what is left is a quarter of that.

    Parameters
    ----------
    model : PreTrainedModel
        With weights; those of its decoder are looked at.

    Returns
    -------
    dict
        Layer of the model -> `KeyOffset`, for `create_cache` or `PagedKVCache`. Empty for models
        without such a bias, with normalised keys, without RoPE, with positions of several axes
        (images), or with RoPE whose frequencies depend on the text's length.

    Notes
    -----
    Weights that change afterwards, by an adapter or by training, make the offset less useful and
    no result wrong. Read once for a model, and again when these weights have changed.
    """
    places, marks, _ = _known.get(model, (None, [], {}))
    if places is None or marks != _marks(places):
        places = _places(model)
        _known[model] = places, _marks(places), _found(places)
    return dict(_known[model][2])


def _places(model: Any) -> _Places:
    """Return the attention modules whose keys may have an offset: with parents, and the RoPE."""
    config = model.config.get_text_config(decoder=True)
    named = (module for _, module in modules_named(model, "rotary_emb"))
    rotary = next((module for module in named if hasattr(module, "inv_freq")), None)
    data = config.to_dict()
    if rotary is None or rope_by_length(data) or "mrope_section" in str(data):
        return []
    pairs = modules_named(model, "self_attn", "attention")
    return [(ref(parent), ref(attention), ref(rotary)) for parent, attention in pairs]


def _marks(places: _Places) -> list[object]:
    """Return what changes when the weights do that are read."""
    marks, biases = list[object](), list[Tensor]()
    for parent, attention, _ in ([x() for x in place] for place in places):
        linear = _key_linear(attention)
        marks.append((id(attention), id(linear)))
        bias, norm = getattr(linear, "bias", None), getattr(parent, "input_layernorm", None)
        if bias is not None:
            for x in (linear.weight, bias, *getattr(norm, "_parameters", {}).values()):
                place = type(x) is Parameter and x.data_ptr()  # others may lie nowhere
                marks.append((id(x), place, x is None or x.is_inference() or x._version))
            if type(bias) is Parameter and not bias.is_meta:
                biases.append(bias.detach().cpu())
    if biases:  # by all numbers: what is written through `data` leaves no other mark
        marks.append(torch.cat(biases).view(torch.uint8).numpy().tobytes())
    return marks


def _found(places: _Places) -> dict[int, KeyOffset]:
    found = {}
    for parent, attention, rotary in ([x() for x in place] for place in places):
        layer, layout = getattr(attention, "layer_idx", None), key_layout(attention)
        norm = getattr(parent, "input_layernorm", None)
        projection = _projection(attention)
        if layer is None or layout is None or projection is None:
            continue
        offset = _offset(projection, norm, rotary, layout)
        if offset is not None:
            found[layer] = offset
    return found


def normalises_keys(model: Any) -> bool:
    """Tell whether a model normalises the keys of its heads (QK-norm) before it rotates them."""
    named = (module for _, module in modules_named(model, "self_attn", "attention"))
    return any(map(_has_key_norm, named))


def _has_key_norm(attention: Any) -> bool:
    return any(getattr(attention, name, None) is not None for name in _KEY_NORMS)


def modules_named(model: Any, *names: str) -> Iterator[tuple[Any, Any]]:
    """Yield parents and those of their modules that have one of these names."""
    for parent in model.modules():
        for name, module in parent.named_children():
            if name in names:
                yield parent, module


def _key_linear(attention: Any) -> Any:
    """Return the layer that projects keys; GPT-NeoX has one for queries, keys and values."""
    linear = getattr(attention, "k_proj", None)
    if linear is None and type(attention).__name__.startswith("GPTNeoX"):
        return getattr(attention, "query_key_value", None)
    return linear


def _projection(attention: Any) -> _Projection | None:
    """Return how keys are made, if they are cached as they are projected and rotated."""
    dim = getattr(attention, "head_dim", None) or getattr(attention, "head_size", None)
    linear = _key_linear(attention)
    if dim is None or _has_key_norm(attention):
        return None
    parts = 1 if hasattr(attention, "k_proj") else 3  # [head, q k v, channel]
    bias = getattr(linear, "bias", None)
    weight: Any = getattr(linear, "weight", None)
    if not isinstance(bias, Tensor) or bias.is_meta or bias.numel() % (parts * dim):
        return None
    b = bias.detach().cpu().float().view(-1, parts, dim)[:, parts // 2]
    plain = isinstance(weight, Tensor) and weight.is_floating_point() and weight.dim() == 2
    if not plain or weight.shape[0] != bias.numel() or weight.is_meta:  # quantised weights
        return _Projection(None, b, bias.dtype)
    w = weight.detach().cpu().float().view(-1, parts, dim, weight.shape[1])[:, parts // 2]
    return _Projection(w, b, bias.dtype)


def key_layout(attention: Any) -> Layout | None:
    """Return which channels the model's own code rotates together; None if that can't be told."""
    module = sys.modules[type(attention).__module__]
    x = torch.tensor([[1.0, 2.0, 3.0, 4.0]], dtype=torch.float32, device="cpu")
    rotate, apply = getattr(module, "rotate_half", None), getattr(module, "_apply_rotary_emb", None)
    if rotate is not None:
        turned = rotate(x)
    elif apply is not None:
        turned = apply(x, x.new_zeros(1, 2), x.new_ones(1, 2))
    else:
        return None
    layouts: dict[tuple[float, ...], Layout]
    layouts = {(-3.0, -4.0, 1.0, 2.0): "half", (-2.0, 1.0, -4.0, 3.0): "interleaved"}
    return layouts.get(tuple(turned.flatten().tolist()))


def _offset(projection: _Projection, norm: Any, rotary: Any, layout: Layout) -> KeyOffset | None:
    weight, bias, dtype = projection
    expected = bias.new_full((len(bias),), float(bias.shape[1])).sqrt()
    if weight is not None:
        factor, shift = getattr(norm, "weight", None), getattr(norm, "bias", None)
        if isinstance(shift, Tensor) and shift.shape == weight.shape[2:]:
            bias = bias + weight @ shift.detach().cpu().float()
        if isinstance(factor, Tensor) and factor.shape == weight.shape[2:]:
            weight = weight * factor.detach().cpu().float()
        expected = weight.flatten(1).norm(dim=1)
    size = bias.norm(dim=1)
    if not (size > expected).any():
        return None
    return KeyOffset.from_bias(
        bias,
        rotary.inv_freq.detach().cpu().float(),
        layout,
        scaling=float(getattr(rotary, "attention_scaling", 1.0)),
        dtype=dtype if dtype in DTYPES else torch.float32,
        leave=(LEFT * expected / size.clamp(min=1e-30)).clamp(min=LEAVE),
    )


def tell_of_bias(attention: Any) -> None:
    """Warn, once, if a layer's keys have a large bias that nobody takes off."""
    if getattr(_key_linear(attention), "bias", None) is None:
        return  # as in most models, in which looking further takes long
    projection = _projection(attention)
    if projection is None:
        return
    size = float(projection.bias.norm(dim=1).max())
    if size > LARGE * projection.bias.shape[1] ** 0.5:
        say_once(
            "bias",
            f"keys of this model have a large bias (norm {size:.0f}), which costs precision below "
            "8 bits. Give the model in the place of its config, CompressedCache(model, spec), or "
            "PagedKVCache(..., key_offsets=key_offsets(model)), so that the bias is stored apart; "
            "CompressedCache(..., key_offsets=None) says that it should not be",
        )


def offsets_of(
    model: Any, layers: int, compressed: Sequence[int], given: Mapping[int, KeyOffset] | str | None
) -> dict[int, KeyOffset] | None:
    """Return the offsets by compressed layer; None where nobody was asked for any."""
    if given == "auto":
        if isinstance(model, PreTrainedConfig):
            return None
        found = key_offsets(model)  # of more layers than one that exits early runs
        return {i: found[x] for i, x in enumerate(compressed) if x in found}
    if not isinstance(given, Mapping | None):
        raise SpecError(f"key_offsets should be 'auto', layer -> KeyOffset or None, not {given!r}")
    for layer, offset in (given or {}).items():
        check_layer(layer, layers)
        if not isinstance(offset, KeyOffset):
            raise DtypeError(f"the key offset of layer {layer} is no KeyOffset: {offset!r}")
    return {i: given[x] for i, x in enumerate(compressed) if given and x in given}
