"""Files that are shipped with the package."""

from importlib.resources import files
from importlib.resources.abc import Traversable

__all__ = ["book_path", "models_path", "recipe_names", "recipe_path"]


def book_path() -> Traversable:
    """Return the excerpt of *Northanger Abbey*; ``book_path().read_text("utf-8")`` reads it."""
    return files(__name__) / "northanger_abbey.txt"


def models_path() -> Traversable:
    """Return the file of models that people run: their layers, and the bytes of slots."""
    return files(__name__) / "models.json"


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
