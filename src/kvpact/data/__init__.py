"""Files that are shipped with the package."""

import json
import tomllib
from functools import cache
from importlib.resources import files
from importlib.resources.abc import Traversable
from typing import Any

__all__ = ["book_path", "calibrated", "method_advice", "model_table", "recipe_names", "recipe_path"]


def book_path() -> Traversable:
    """Return the excerpt of *Northanger Abbey*; ``book_path().read_text("utf-8")`` reads it."""
    return files(__name__) / "northanger_abbey.txt"


def calibrated() -> Traversable:
    """Return the folder of calibrations; its models.toml tells of which models they are."""
    return files(__name__) / "calibrations"


@cache
def model_table() -> dict[str, Any]:
    """Return models.json: ``models`` that people run, their ``sources``, ``slots`` by spec."""
    table: dict[str, Any] = json.loads((files(__name__) / "models.json").read_text("utf-8"))
    return table


@cache
def method_advice() -> dict[str, dict[str, Any]]:
    """Return advice.toml: by method, what it is for (``use``), and when not (``avoid``)."""
    return tomllib.loads((files(__name__) / "advice.toml").read_text("utf-8"))


def recipe_names() -> list[str]:
    """Return the names of the recipes that are shipped, without ``recipe:``."""
    names = [x.name for x in (files(__name__) / "recipes").iterdir()]
    return sorted(name.removesuffix(".toml") for name in names if name.endswith(".toml"))


def recipe_path(name: str) -> Traversable:
    """Return the file of a recipe.

    Parameters
    ----------
    name : str
        One of `recipe_names`.
    """
    return files(__name__) / "recipes" / f"{name}.toml"
