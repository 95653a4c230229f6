"""Key offsets of transformers' models, read from their weights."""

import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor
from torch.nn import Parameter

from kvpact.cache import check_layer
from kvpact.errors import DtypeError, MismatchError, SpecError
from kvpact.integrations.transformers.model.fallback import say_once
from kvpact.integrations.transformers.versions import PreTrainedConfig
from kvpact.integrations.weights import gathers, mark, read, read_if_known
from kvpact.key_offset import DTYPES, LEAVE, KeyOffset, Layout
from kvpact.spec import Spec

_BY_LENGTH = ("dynamic", "longrope", "su")
"""Kinds of RoPE whose frequencies depend on how long the whole text is."""
_PACKED = ("qkv_proj", "query_key_value", "Wqkv", "c_attn")
_KEY_NORMS = ("k_norm", "k_layernorm", "key_layernorm", "k_ln")
LEFT = 0.25
"""The part of a bias that may stay, as a share of the size of what the weights add to it."""
LARGE = 4.0  # a bias so many times as large as a vector of ones is worth a warning


class _Projection(NamedTuple):
    """Keys before the rotation are `weight x + bias`: `[H, D, hidden]` or None, and `[H, D]`."""

    weight: Tensor | None
    bias: Tensor
    dtype: torch.dtype


class _Places(NamedTuple):
    """Attention modules with parents and RoPE, whose keys may have an offset; see `gathers`."""

    modules: Sequence[tuple[ref[Any], ...]]
    gather: bool

    def there(self) -> list[list[Any]]:
        """Return the modules themselves."""
        return [[x() for x in place] for place in self.modules]


_Found = tuple[dict[int, KeyOffset], str]  # offsets by layer, and why a layer's is not known
_known: WeakKeyDictionary[Any, tuple[_Places, list[object], _Found]]
_known = WeakKeyDictionary()


def entries(config: dict[Any, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the names and values in a config's data and in all that is inside it."""
    for name, value in config.items():
        if isinstance(value, dict):
            yield from entries(value)
        else:
            yield str(name), value


def rotaries(model: Any, name: str = "rotary_emb") -> Iterator[tuple[Any, Any]]:
    """Yield the rotary embeddings of a model that have frequencies, each after its parent."""
    for parent, rotary in modules_named(model, name):
        if any(x.endswith("inv_freq") for x, _ in rotary.named_buffers(recurse=False)):
            yield parent, rotary


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
    no result wrong. Read once for a model, and again when these weights have changed. Where a bias
    can't be read there is no offset, and a warning says so. With FSDP2 all processes have to call
    this, or make their caches, together.
    """
    found, unknown = _read(model)
    if unknown:
        _tell_of_unknown(unknown, model)
    return dict(found)


def _read(model: Any) -> _Found:
    """Return a model's offsets, read when its weights have changed."""
    places, marks, _ = _known.get(model, (None, [], None))
    if places is None or marks != _marks(places):
        places = _places(model)
        _known[model] = places, _marks(places), _found(places)
    return _known[model][2]


def _places(model: Any) -> _Places:
    """Return the `_Places` of a model; empty where its RoPE allows no offset."""
    config = model.config.get_text_config(decoder=True)
    named = (module for _, module in modules_named(model, "rotary_emb"))
    rotary = next((module for module in named if hasattr(module, "inv_freq")), None)
    data = config.to_dict()
    if rotary is None or rope_by_length(data) or "mrope_section" in str(data):
        return _Places([], False)
    pairs = modules_named(model, "self_attn", "attention")
    modules = [(ref(parent), ref(attention), ref(rotary)) for parent, attention in pairs]
    return _Places(modules, gathers(model))


def _marks(places: _Places) -> list[object]:
    """Return marks that change when the weights that are read do."""
    marks, biases = list[object](), list[Tensor]()
    for parent, attention, _ in places.there():
        linear = _key_linear(attention)
        marks.append((id(attention), id(linear)))
        bias, norm = getattr(linear, "bias", None), getattr(parent, "input_layernorm", None)
        if bias is not None:
            weights = getattr(linear, "weight", None), bias
            marks += map(mark, (*weights, *getattr(norm, "_parameters", {}).values()))
            if type(bias) is Parameter and not bias.is_meta and bias.data_ptr():  # it is there
                biases.append(bias.detach().cpu())
    if biases:  # by all numbers: what is written through `data` leaves no other mark
        marks.append(torch.cat(biases).view(torch.uint8).numpy().tobytes())
    return marks


def _found(places: _Places) -> _Found:
    found, unknown = {}, ""
    for parent, attention, rotary in places.there():
        layer, layout = getattr(attention, "layer_idx", None), key_layout(attention)
        if layer is None or layout is None:
            continue
        try:
            projection = _projection(attention, parent, places.gather)
            frequencies = read(rotary, "inv_freq")
        except MismatchError as error:
            unknown = str(error)
            continue
        if projection is None or frequencies is None:
            continue
        offset = _offset(projection, rotary, frequencies, layout)
        if offset is not None:
            found[layer] = offset
    return found, unknown


def normalises_keys(model: Any) -> bool:
    """Return whether a model normalises the keys of its heads (QK-norm) before it rotates them."""
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


def _projection(attention: Any, parent: Any = None, gather: bool = False) -> _Projection | None:
    """Return how cached keys are projected; raises `MismatchError` where a bias can't be read."""
    dim = getattr(attention, "head_dim", None) or getattr(attention, "head_size", None)
    linear = _key_linear(attention)
    if dim is None or _has_key_norm(attention):
        return None
    if linear is None:
        if any(getattr(getattr(attention, x, None), "bias", None) is not None for x in _PACKED):
            raise MismatchError(f"which part of a {type(attention).__name__} makes keys is unknown")
        return None
    parts = 1 if hasattr(attention, "k_proj") else 3  # [head, q k v, channel]
    around = attention, parent
    bias = read(linear, "bias", around, gather)
    if bias is None or bias.numel() % (parts * dim):
        return None
    dtype, bias = bias.dtype, bias.cpu().float().view(-1, parts, dim)[:, parts // 2]
    weight = read_if_known(linear, "weight", around, gather)
    if weight is None or weight.dim() != 2 or weight.shape[0] != bias.numel() * parts:
        return _Projection(None, bias, dtype)  # quantised weights
    weight = weight.cpu().float().view(-1, parts, dim, weight.shape[1])[:, parts // 2]
    norm = getattr(parent, "input_layernorm", None)
    factor, shift = (read_if_known(norm, x, (parent,), gather) for x in ("weight", "bias"))
    if shift is not None and shift.shape == weight.shape[2:]:
        bias = bias + weight @ shift.cpu().float()
    if factor is not None and factor.shape == weight.shape[2:]:
        weight = weight * factor.cpu().float()
    return _Projection(weight, bias, dtype)


def key_layout(attention: Any) -> Layout | None:
    """Return which channels the model's own code rotates together; None if that is unknown."""
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


def _offset(
    projection: _Projection, rotary: Any, frequencies: Tensor, layout: Layout
) -> KeyOffset | None:
    weight, bias, dtype = projection
    expected = bias.new_full((len(bias),), float(bias.shape[1])).sqrt()
    if weight is not None:
        expected = weight.flatten(1).norm(dim=1)
    size = bias.norm(dim=1)
    if not (size > expected).any():
        return None
    return KeyOffset.from_bias(
        bias,
        frequencies.cpu().float(),
        layout,
        scaling=float(getattr(rotary, "attention_scaling", 1.0)),
        dtype=dtype if dtype in DTYPES else torch.float32,
        leave=(LEFT * expected / size.clamp(min=1e-30)).clamp(min=LEAVE),
    )


def _tell_of_unknown(why: str, model: Any) -> None:
    """Warn, once, that keys may have a bias that can't be read."""
    say_once(
        "unknown bias",
        f"the bias of this model's keys is not known ({why}): none is stored apart, which, where "
        "it is large, costs precision below 8 bits. Give key_offsets=, what key_offsets(model) "
        "gives for the model with plain weights, or key_offsets=None if there is no such bias",
        model,
    )


def tell_of_bias(attention: Any) -> None:
    """Warn, once, if a layer's keys have a large bias that is not subtracted."""
    linear = _key_linear(attention)
    if linear is None or getattr(linear, "bias", linear) is None:
        return  # as in most models, in which looking further takes long
    try:
        projection = _projection(attention)
    except MismatchError as error:
        return _tell_of_unknown(str(error), attention)
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
            attention,
        )


def offsets_of(
    model: Any,
    specs: Sequence[Spec],
    compressed: Sequence[int],
    given: Mapping[int, KeyOffset] | str | None,
) -> dict[int, KeyOffset] | None:
    """Return the offsets by compressed layer; None where none were asked for."""
    if given == "auto":
        if isinstance(model, PreTrainedConfig):
            return None
        found, unknown = _read(model)  # of more layers than one that exits early runs
        if unknown and any(specs[layer].key.name != "none" for layer in compressed):
            _tell_of_unknown(unknown, model)
        return {i: found[x] for i, x in enumerate(compressed) if x in found}
    if not isinstance(given, Mapping | None):
        raise SpecError(f"key_offsets should be 'auto', layer -> KeyOffset or None, not {given!r}")
    for layer, offset in (given or {}).items():
        check_layer(layer, len(specs))
        if not isinstance(offset, KeyOffset):
            raise DtypeError(f"the key offset of layer {layer} is no KeyOffset: {offset!r}")
    return {i: given[x] for i, x in enumerate(compressed) if given and x in given}
