"""Sizes of caches, counted from formats and shapes; nothing is allocated.

What models that people run cache, and what slots of usual specs take, stands in data/models.json:
of these, sizes are known without transformers and torch, which take seconds to import.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from functools import lru_cache
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvpact.callable_package import Told
from kvpact.data import model_table
from kvpact.errors import GeometryError, KVPactError, SpecError
from kvpact.files import aligned, size_text
from kvpact.geometry import CacheGeometry, check_count, dtype_of
from kvpact.integrations.layer_shape import LayerShape, with_packed_windows
from kvpact.recipe import SpecLike, layer_specs
from kvpact.spec import DEFAULT_SPEC, Spec, is_spec
from kvpact.units import StreamFacts

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

PARTS = ("slots", "factors", "sinks", "window", "unused")
"""Of compressed layers: packed slots, what codecs learn, exact tokens, allocated and not used."""
MOST_LAYERS = 4096  # of a model, which is built without weights to see what it caches
TOKENS = ("4k", "32k", "128k")
SPECS = (
    "none",
    "fp8",
    "int:bits=8",
    "int:bits=4",
    "turboquant:bits=4",
    DEFAULT_SPEC,
    "trellis:bits=2",
    "kivi:bits=2",
)
"""The specs that are shown where none is named, from the most bytes to the fewest."""


@dataclass(frozen=True)
class SizeRow(Told):
    """The bytes of one cache at one length.

    Parameters
    ----------
    spec : str
        As it was given; ``recipe`` for a mapping.
    tokens : int
        Of each sequence.
    slots, factors, sinks, window, unused : int
        Of compressed layers: packed slots, what codecs learn, exact tokens, allocated and not used.
    compressed : int
        Their sum, which is what `memory_usage` of such a cache counts.
    own : int
        What transformers holds of other layers.
    total, exact : int
        All layers, and all layers with K and V in 16 bits.
    bits_per_value : float, optional
        Of the compressed layers; None without values.
    """

    spec: str
    tokens: int
    slots: int
    factors: int
    sinks: int
    window: int
    unused: int
    compressed: int
    own: int
    total: int
    exact: int
    bits_per_value: float | None


@dataclass(frozen=True, repr=False)
class SizeResult(Told):
    """The bytes of caches of a model; `print` shows them as a table.

    Parameters
    ----------
    model : str, optional
        The name that was given.
    positions : int, optional
        Tokens that the model is made for.
    dtype : str
        Of all that is not compressed.
    batch : int
        Sequences.
    layers : list of dict
        Each shape of a layer, and how many layers have it (``count``).
    rows : list of SizeRow
        Each spec at each length.
    unplanned : list of str
        What only the tokens decide.
    """

    model: str | None
    positions: int | None
    dtype: str
    batch: int
    layers: list[dict[str, Any]]
    rows: list[SizeRow]
    unplanned: list[str]

    def __repr__(self) -> str:
        lengths = list(dict.fromkeys(row.tokens for row in self.rows))
        lines = [["spec", *(f"{tokens:,} tokens" for tokens in lengths), "of 16 bits"]]
        for at in range(0, len(self.rows), len(lengths)):
            rows = self.rows[at : at + len(lengths)]
            share = f"{100 * rows[-1].total / rows[-1].exact:.1f} %" if rows[-1].exact else "-"
            lines.append([rows[0].spec, *(size_text(row.total) for row in rows), share])
        return aligned(lines)


def size(
    model: str | PathLike[str] | PreTrainedConfig | PreTrainedModel | CacheGeometry,
    specs: SpecLike | Sequence[SpecLike] = SPECS,
    tokens: int | str | Sequence[int | str] = TOKENS,
    *,
    batch: int = 1,
    dtype: str | None = None,
    k_eq_v: bool = False,
    sliding: str | Spec | None = None,
) -> SizeResult:
    """Return the bytes that caches of a model take; no weights are loaded.

    Parameters
    ----------
    model : str, path, PreTrainedConfig, PreTrainedModel or CacheGeometry
        One of some 45 names such as ``qwen3-8b`` (without a network, and without torch), a hub id,
        a folder, a ``config.json``, or what is loaded already.
    specs : str, Spec, path, mapping or a sequence of them
        Specs or recipes; a common selection if omitted.
    tokens : int, str or a sequence of them
        Tokens of a sequence: ``32k`` means 32,768.
    batch : int
        Sequences.
    dtype : str, optional
        Of sinks, window and uncompressed caches; the model's if omitted, or float16 where that is
        wider.
    k_eq_v : bool
        Of caches that hold values alone where keys are made of them (see `CompressedCache`).
    sliding : str or Spec, optional
        Of caches whose layers with sliding attention are packed by this spec; among ``own``.

    Raises
    ------
    KVPactError
        No such model, spec or number, or no layer of the model makes keys of values.

    Examples
    --------
    >>> import kvpact
    >>> print(kvpact.size("qwen3-8b", ["none", "trellis:bits=4"], "32k"))
    spec            32,768 tokens  of 16 bits
    none                  4.83 GB     100.0 %
    trellis:bits=4        1.26 GB      26.0 %
    """
    check_count("batch", batch, 1)
    asked = [specs] if isinstance(specs, str | Spec | PathLike | Mapping) else list(specs)
    given = [tokens] if isinstance(tokens, str | int | float) else tokens
    lengths = list(dict.fromkeys(map(length_of, given)))
    held = layers_of(model, dtype)
    if others := [x for x in asked if isinstance(x, str) and x in model_table()["models"]]:
        raise SpecError(f"{others[0]!r} is a model and no spec; write: kvpact.size({others[0]!r})")
    held = values_alone(held) if k_eq_v else held
    if sliding is not None:
        held = replace(held, shapes=with_packed_windows(held.shapes, sliding))
    return SizeResult(
        model=str(model) if isinstance(model, str | PathLike) else None,
        positions=held.positions,
        dtype=held.dtype,
        batch=batch,
        layers=[{"count": n, **shape._asdict()} for shape, n in Counter(held.shapes).items()],
        rows=[
            SizeRow(
                "recipe" if isinstance(spec, Mapping) else str(spec),
                length,
                **planned(spec, held, length, batch),
            )
            for spec in asked
            for length in lengths
        ],
        unplanned=sorted({x for spec in asked for x in not_planned(spec, held)}),
    )


def length_of(tokens: int | str) -> int:
    """Return the tokens that a number such as 4096 or 32k means."""
    found = re.fullmatch(r"([0-9]{1,15})(k?)", str(tokens).strip().lower())
    if found is None or not int(found[1]):
        raise GeometryError(f"{tokens} is no number of tokens; take one such as 4096 or 32k")
    return int(found[1]) * (1024 if found[2] else 1)


@dataclass(frozen=True)
class Layers:
    """The layers of a model's cache; `dtype` is that of all that is not compressed."""

    shapes: Sequence[LayerShape]
    dtype: str
    positions: int | None = None

    @property
    def itemsize(self) -> int:
        """Bytes of a number that is not compressed."""
        return 4 if self.dtype == "float32" else 2


def known_name(name: str) -> str | None:
    """Return a model's name in data/models.json, given this or its hub id; a folder goes first."""
    names = {model["hub"].lower(): known for known, model in model_table()["models"].items()}
    known = names.get(name.lower(), name.lower())
    return known if known in model_table()["models"] and not Path(name).exists() else None


def layers_of(
    model: str | PathLike[str] | PreTrainedConfig | PreTrainedModel | CacheGeometry,
    dtype: str | None = None,
) -> Layers:
    """Return the layers of what `size` takes: of a name the config alone is loaded, or nothing."""
    if isinstance(model, CacheGeometry):
        own = str(model.dtype).removeprefix("torch.") if model.dtype else "float16"
        dims = model.num_kv_heads, model.head_dim, model.value_dim
        shape = LayerShape("full_attention", True, *dims, latent=model.latent)
        dtype_of(dtype or own)
        return Layers([shape] * model.num_layers, dtype or own)
    if not isinstance(model, str | PathLike):
        return _layers_of_config(getattr(model, "config", model), type(model).__name__, dtype)
    known = known_name(str(model))
    if known is None:
        return _layers_of_config(_loaded(str(model)), str(model), dtype)
    table = model_table()["models"][known]
    if dtype == "float32":  # of 16 bits alone it is known what slots and states take
        from transformers import AutoConfig

        return _layers_of_config(AutoConfig.for_model(**table["config"]), known, dtype)
    if dtype is not None:
        dtype_of(dtype)
    kinds = [LayerShape(**kind) for kind in table["kinds"]]
    shapes = [kinds[int(digit)] for digit in table["order"]]
    return Layers(shapes, dtype or "bfloat16", table["config"].get("max_position_embeddings"))


def values_alone(layers: Layers) -> Layers:
    """Return layers that hold no keys where these are made of values. Raises `SpecError`."""
    if not any(shape.k_eq_v for shape in layers.shapes):
        raise SpecError("no layer of this model makes keys of its values: leave k_eq_v out")
    return replace(layers, shapes=[x._replace(made=x.k_eq_v) for x in layers.shapes])


def _loaded(name: str) -> PreTrainedConfig:
    near = get_close_matches(Path(name).name.lower(), model_table()["models"], n=3)
    known = f"; known without a network: {', '.join(near)}" if near else ""
    if not Path(name).expanduser().exists():
        if name.endswith((".json", ".toml")):
            raise GeometryError(f"there is no file {name!r}; give a config.json or a model's name")
        if is_spec(name):
            wanted = "give a model first, such as 'qwen3-8b', or numbers: layers, KV heads, width"
            raise GeometryError(f"{name!r} is a spec and no model; {wanted}")
        if "/" not in name:
            listed = "`kvpact size --list` lists all; a hub's ids (a GGUF's too) are owner/name"
            raise GeometryError(f"no model {name!r} is known{known}; {listed}")
    from kvpact.integrations.models import load_config

    try:
        return load_config(name)
    except KVPactError as error:
        raise type(error)(f"{error}{known}") from error


def _layers_of_config(config: Any, name: str, dtype: str | None) -> Layers:
    if not hasattr(config, "get_text_config"):
        raise GeometryError(
            f"{name} is no model; write kvpact.size('qwen3-8b'), or kvpact.size(model)"
        )
    from kvpact.integrations.transformers.layers.shapes import layer_shapes

    chosen = dtype_of(dtype) if dtype is not None else _dtype(config)
    decoder = config.get_text_config(decoder=True)
    layers = getattr(decoder, "num_hidden_layers", 1)
    if not 1 <= layers <= MOST_LAYERS:
        raise GeometryError(f"{name} tells of {layers} layers; 1 to {MOST_LAYERS} can be looked at")
    positions = getattr(decoder, "max_position_embeddings", None)
    return Layers(layer_shapes(config, chosen), str(chosen).removeprefix("torch."), positions)


def _dtype(config: Any) -> Any:
    """Return a model's dtype; float16, in which it is served, where that is wider or unknown."""
    import torch

    named = getattr(config, "dtype", None) or config.get_text_config(decoder=True).dtype
    return named if isinstance(named, torch.dtype) and named.itemsize <= 2 else torch.float16


def planned(spec: SpecLike, layers: Layers, tokens: int, batch: int) -> dict[str, Any]:
    """Return the bytes of a cache: the fields of a `SizeRow` after its first two."""
    found = Counter(dict.fromkeys(PARTS, 0))
    packed = [spec != "none"] * len(layers.shapes)
    parts = _known_parts(spec, layers, tokens, batch)
    if parts is None:
        triples = _coded(spec, layers)
        parts = [_layer_bytes(each, x, tokens // rate, batch) for each, x, rate in triples]
        exact = iter([each.key.name == "none" for each, *_ in triples])
        packed = [x.compressed and not next(exact) for x in layers.shapes]
    for part in parts:
        found.update(part)
    compressed, shapes = sum(found.values()), (x for x in layers.shapes if x.compressed)
    values = batch * sum(tokens // x.rate * x.heads * (x.key_dim + x.value_dim) for x in shapes)
    given = tokens, batch, layers.itemsize
    exact_own = sum(shape.own_bytes(*given) for shape in layers.shapes)
    both = zip(layers.shapes, packed, strict=True)
    own = sum(x.own_bytes(*given, packed=coded or x.sliding is not None) for x, coded in both)
    return {
        **found,
        "compressed": compressed,
        "own": own,
        "total": compressed + own,
        "exact": 2 * values + exact_own,
        "bits_per_value": 8 * compressed / values if values else None,
    }


def _known_parts(
    spec: SpecLike, layers: Layers, tokens: int, batch: int
) -> list[dict[str, int]] | None:
    """Return the parts of each compressed layer; None where data/models.json lacks its slots."""
    slots = model_table()["slots"].get(spec) if isinstance(spec, str) else None
    shapes = [x for x in layers.shapes if x.compressed]
    widths = [f"{x.key_dim},{x.value_dim},{x.latent:d}" for x in shapes]
    if layers.itemsize != 2 or slots is None or not slots.keys() >= set(widths):
        return None
    parts = []
    for shape, width in zip(shapes, widths, strict=True):
        for side in slots[width][shape.made :]:
            facts = StreamFacts(*side)
            facts = facts._replace(state=facts.state * shape.heads)
            parts.append(facts.held(tokens // shape.rate, batch, shape.heads, layers.itemsize))
    return parts


def not_planned(spec: SpecLike, layers: Layers) -> list[str]:
    """Return the parts of a size that depend on the tokens themselves, in words."""
    if _known_parts(spec, layers, 0, 1) is not None:
        return []
    from kvpact.cache import unplanned

    pairs = {(each, geometry) for each, geometry, _ in _coded(spec, layers)}
    return sorted({x for pair in pairs for x in unplanned(*pair)})


def _coded(spec: SpecLike, layers: Layers) -> list[tuple[Spec, CacheGeometry, int]]:
    """Return spec, geometry and rate of each compressed layer."""
    from kvpact.cache import cache_specs

    dtype, found = dtype_of(layers.dtype), []
    for each, shape in zip(layer_specs(spec, len(layers.shapes)), layers.shapes, strict=True):
        if shape.compressed:
            geometry = shape.geometry(dtype)
            found.append((cache_specs(each, geometry)[0], geometry, shape.rate))
    return found


@lru_cache(maxsize=256)
def _layer_bytes(spec: Spec, geometry: CacheGeometry, tokens: int, batch: int) -> dict[str, int]:
    from kvpact.cache import planned_bytes

    found = planned_bytes(spec, geometry, tokens, batch)
    return {name: found[name] for name in PARTS}
