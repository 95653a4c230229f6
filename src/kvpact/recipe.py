"""Recipes: one spec for most layers, others for named layers, in TOML, JSON or a mapping.

```toml
default = "turboquant:bits=3,center=64"
[layers]
0 = "int:bits=8"
-1 = "int:bits=8"
```
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from typing import Any

from kvpact.errors import SpecError
from kvpact.spec import Spec, parse_spec, whole_number

SpecLike = str | Spec | PathLike[str] | Mapping[str, Any]


def layer_specs(source: SpecLike, num_layers: int) -> list[Spec]:
    """Return the spec of every layer.

    Parameters
    ----------
    source : str, Spec, path or mapping
        A spec (the same for all layers), or a recipe: a mapping, or the path of a ``.toml`` or
        ``.json`` file that holds one. Layers count from 0, or from the end with -1, -2, ….
    num_layers : int
        Layers of the cache.

    Raises
    ------
    SpecError
        The recipe can't be read, or names a layer that is not there or one layer twice.
    """
    if isinstance(source, PathLike) or (
        isinstance(source, str) and source.endswith((".toml", ".json"))
    ):
        source = _read(Path(source))
    if not isinstance(source, Mapping):
        return [parse_spec(source)] * num_layers
    unknown = set(source) - {"default", "layers"}
    if unknown or "default" not in source or not isinstance(source.get("layers", {}), Mapping):
        raise SpecError("a recipe has 'default' (a spec) and, if wanted, 'layers' (index -> spec)")
    specs = [parse_spec(source["default"])] * num_layers
    named: set[int] = set()
    for key, text in source.get("layers", {}).items():
        try:
            index = whole_number(str(key))
        except ValueError:
            raise SpecError(f"recipe: layer {key!r} should be a whole number") from None
        if not -num_layers <= index < num_layers:
            raise SpecError(f"recipe: layer {index} is not among {num_layers} layers")
        if index % num_layers in named:
            raise SpecError(f"recipe: layer {index} stands twice")
        named.add(index % num_layers)
        specs[index] = parse_spec(text)
    return specs


def _read(path: Path) -> Mapping[str, Any]:
    try:
        text = path.read_text("utf-8")
        data = tomllib.loads(text) if path.suffix == ".toml" else _read_json(text)
    except (OSError, ValueError, RecursionError) as error:
        raise SpecError(f"recipe {path} can't be read: {error}") from error
    if not isinstance(data, Mapping):
        raise SpecError(f"recipe {path} should be a table with 'default' and 'layers'")
    return data


def _read_json(text: str) -> Any:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        if len(dict(pairs)) != len(pairs):
            raise ValueError(f"a key stands twice among {[key for key, _ in pairs]}")
        return dict(pairs)

    return json.loads(text, object_pairs_hook=unique)
