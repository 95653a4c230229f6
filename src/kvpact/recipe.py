"""Recipes: one spec for most layers, others for named layers, in TOML, JSON or a mapping.

::

    default = "turboquant:bits=3,center=64"
    num_layers = 30  # if it is for models of so many layers only
    [layers]
    0 = "int:bits=8"
    -1 = "int:bits=8"
    [ladder]  # for caches with a budget: what a distortion costs, by layer
    key = [1.0, 0.4, …]
    value = [0.7, 0.5, …]
    [measured]  # what is known of it, for readers

``recipe:NAME`` stands for a file that kvpact ships (`kvpact.data.recipe_names`).
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping
from importlib.resources.abc import Traversable
from math import inf
from os import PathLike
from pathlib import Path
from typing import Any

from kvpact.data import recipe_names, recipe_path
from kvpact.errors import SpecError
from kvpact.spec import RECIPE_PREFIX, Spec, parse_spec, whole_number

SpecLike = str | Spec | PathLike[str] | Mapping[str, Any]
_FILES = (".toml", ".json")
_KEYS = {"default", "layers", "num_layers", "ladder", "measured"}


def is_recipe(source: SpecLike) -> bool:
    """Return whether a recipe is given, by name, file or mapping, and not a spec."""
    if isinstance(source, str):
        text = source.strip()
        return text.startswith(RECIPE_PREFIX) or text.endswith(_FILES)
    return isinstance(source, PathLike | Mapping)


def load_recipe(source: SpecLike) -> Mapping[str, Any]:
    """Return a recipe, for which `is_recipe` is true, as it is written; its specs are not read."""
    if isinstance(source, Mapping):
        recipe = source
    else:
        name = str(source).strip()
        recipe = _read(_shipped(name) if name.startswith(RECIPE_PREFIX) else Path(name))
    names = "layers", "ladder", "measured"
    tables = all(isinstance(recipe.get(key, {}), Mapping) for key in names)
    if set(recipe) - _KEYS or "default" not in recipe or not tables:
        raise SpecError(
            "a recipe has 'default' (a spec) and, if wanted, 'layers' (index -> spec), "
            "'num_layers', 'ladder' and 'measured' (tables), and nothing else; several specs to "
            "compare stand in a list, ['trellis:bits=4', 'int:bits=8']"
        )
    return recipe


def layer_specs(source: SpecLike, num_layers: int) -> list[Spec]:
    """Return the spec of every layer: of a spec, or a recipe (mapping, path, ``recipe:NAME``)."""
    if not isinstance(source, PathLike | Mapping) and not is_recipe(source):
        return [parse_spec(source)] * num_layers
    recipe = load_recipe(source)
    if (wanted := recipe.get("num_layers", num_layers)) != num_layers:
        name = "the recipe" if isinstance(source, Mapping) else f"recipe {str(source)!r}"
        raise SpecError(
            f"{name} is for a model of {wanted} layers, and this one has {num_layers}: make "
            "one for it with kvpact recommend"
        )
    specs = [parse_spec(recipe["default"])] * num_layers
    named: set[int] = set()
    for key, text in recipe.get("layers", {}).items():
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


def sensitivities(source: SpecLike, num_layers: int) -> dict[tuple[int, int], float] | None:
    """Return what a distortion costs by layer and side, None if unknown; `SpecError`."""
    ladder = load_recipe(source).get("ladder") if is_recipe(source) else None
    if ladder is None:
        return None
    found: dict[tuple[int, int], float] = {}
    for side, name in enumerate(("key", "value")):
        numbers = ladder.get(name)
        good = isinstance(numbers, list) and len(numbers) == num_layers and len(ladder) == 2
        if not good or not all(type(x) in (int, float) and 0 <= x < inf for x in numbers):
            raise SpecError(
                f"recipe: 'ladder' has 'key' and 'value', {num_layers} numbers each, one a layer"
            )
        found |= {(layer, side): float(x) for layer, x in enumerate(numbers)}
    return found


def _shipped(name: str) -> Traversable:
    wanted, names = name.removeprefix(RECIPE_PREFIX), recipe_names()
    if wanted not in names:
        there = ", ".join(RECIPE_PREFIX + x for x in names)
        raise SpecError(f"there is no {name!r}: kvpact ships {there}; other recipes are files")
    return recipe_path(wanted)


def _read(path: Path | Traversable) -> Mapping[str, Any]:
    try:
        text = path.read_text("utf-8")
        data = tomllib.loads(text) if path.name.endswith(".toml") else _read_json(text)
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
